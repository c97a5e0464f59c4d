"""Make the calls that a file lists, by the module that the first argument names, and write down how each ended."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

Spec = dict[str, Any]


def main() -> None:
    MPI = importlib.import_module(sys.argv[1])
    comm = MPI.COMM_WORLD
    ends = [ended(MPI, comm, spec) for spec in json.loads(Path(sys.argv[2]).read_text())]
    Path(f"{sys.argv[3]}-{comm.Get_rank()}").write_text(json.dumps(ends))


def ended(MPI: Any, comm: Any, spec: Spec) -> list[Any]:
    """Return ["result", the elements of each buffer], or ["error", its class or type]."""
    rank, size, n = comm.Get_rank(), comm.Get_size(), spec["n"]
    root, op = spec["root"], getattr(MPI, spec["op"])

    def buffer(blocks: int, wrong: str = "", shift: int = 0) -> Any:
        values = (np.arange(n * blocks) * (rank + 2) + shift) % 5
        array = form(values.astype(spec["dtype"]), wrong or spec["order"])
        if wrong == "null":
            return [array, array.size, MPI.DATATYPE_NULL]
        return array

    name, wrong = spec["call"], spec["wrong"]
    verb = name.removeprefix("I").capitalize()
    sent = 2 if verb in ("Alltoall", "Reduce_scatter_block", "Reduce_scatter") else 1
    took = {"Allgather": size, "Alltoall": size, "Gather": size}.get(verb, 1)
    mine = buffer(size if sent == 2 else 1, wrong if wrong in ("strided", "null") else "")
    if verb == "Scatter":
        mine = buffer(size) if rank == root else None
    into = buffer(took, shift=3)
    if wrong == "longer" and not isinstance(into, list):
        into = np.concatenate([into.reshape(-1), into.reshape(-1)])
    if spec["in_place"] and verb in ("Allreduce", "Allgather", "Scan", "Alltoall"):
        mine = MPI.IN_PLACE
    arguments: list[Any] = {
        "Bcast": [mine, root],
        "Gather": [mine, into if rank == root else None, root],
        "Scatter": [mine, into, root],
        "Allgather": [mine, into],
        "Alltoall": [mine, into],
        "Reduce": [mine, into if rank == root else None, op, root],
        "Allreduce": [mine, into, op],
        "Scan": [mine, into, op],
        "Reduce_scatter_block": [mine, into, op],
        "Sendrecv": [mine, (rank + 1) % size, 3, into, (rank - 1) % size, 3],
    }[verb]
    try:
        request = getattr(comm, name)(*arguments)
        if name.startswith("I"):
            request.Wait()
    except MPI.Exception as error:
        return ["error", named(MPI, error.Get_error_class())]
    except Exception as error:  # noqa: BLE001  - mpi4py raises many kinds
        return ["error", type(error).__name__]
    return ["result", [described(x) for x in (mine, into) if isinstance(x, np.ndarray)]]


def form(array: Any, how: str) -> Any:
    """Return the elements in an array of another order; of shape (n,) unless two columns can be made of them."""
    if how == "strided":
        return np.repeat(array, 2)[::2]
    return array.reshape(-1, 2).copy(order="F") if how == "fortran" and array.size and array.size % 2 == 0 else array


def described(array: Any) -> list[str]:
    return [str(x) for x in array.ravel(order="K").tolist()]


def named(MPI: Any, error_class: int) -> str:
    names = ("BUFFER", "COUNT", "TYPE", "TAG", "COMM", "RANK", "ROOT", "OP", "ARG", "TRUNCATE", "REQUEST")
    return next((f"ERR_{name}" for name in names if getattr(MPI, f"ERR_{name}") == error_class), str(error_class))


if __name__ == "__main__":
    main()

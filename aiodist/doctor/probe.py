"""Questions that `aiodist doctor` asks in other processes: each prints its answer as a JSON object.

`python -m aiodist.doctor.probe QUESTION` asks one on this host. The text of this file is also sent to the Python of
other hosts, which may have another aiodist or none. So the file imports only the standard library at its top.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from glob import escape, glob
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def answer(answer: Mapping[str, Any]) -> None:
    """Print an answer as one line."""
    print(json.dumps(answer), flush=True)  # noqa: T201


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch() -> None:
    """Report torch's CUDA, GPUs and gloo."""
    import torch
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    answer({"cuda": torch.version.cuda, "gpus": torch.cuda.device_count(), "gloo": gloo})


def memfd() -> None:
    """Create the memory that ranks share, and seal its size."""
    fd = os.memfd_create("aiodist-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    answer({"sealed": True})


def ranks(backend: str | None = None) -> None:
    """Report from rank 0 the size of an aiodist job, its backend, its MPI library, and the implementations."""
    import aiodist

    async def main() -> None:
        async with aiodist.init(backend=backend, timeout=30) as coll:
            met = await coll.allgather_object(coll.rank)
            offers = coll.availability()
            shm = offers.of("allreduce", "shm")
            said = {"size": len(met), "backend": coll.backend, "separate": shm.reason * (shm.state != "available")}
            if coll.backend == "mpi":
                from mpi4py import MPI

                said["library"] = MPI.Get_library_version().splitlines()[0].split(",")[0].strip(" \0")
            if coll.rank == 0:
                chosen = {"The implementation of each operation by size": str(coll.selector)}
                answer({**said, "tables": {"Implementations for two ranks": str(offers), **chosen}})

    aiodist.run(main())


def sockets() -> None:
    """Report from rank 0 an aiodist job over gloo."""
    ranks("gloo")


def host(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a job on this host, which must be equal on all hosts, and its way to the launcher."""
    spec = find_spec("aiodist")
    parts = {
        "Python": platform.python_version(),
        **{name: version(name) for name in asked["packages"]},
        "source": _digest(os.path.dirname(spec.origin)) if spec and spec.origin else None,
        "folder": asked["folder"] if os.path.isdir(asked["folder"]) else None,
        "script": _digest(asked["script"]) if asked["script"] else None,
    }
    daemon = next((path for path in asked["daemons"] if os.access(path, os.X_OK)), None)
    said = {"parts": parts, "daemon": daemon, "cores": len(os.sched_getaffinity(0)), "all cores": os.cpu_count()}
    try:
        with socket.create_connection(tuple(asked["launcher"]), timeout=5) as connection:
            return {**said, "address": connection.getsockname()[0]}
    except OSError as error:
        return {**said, "address": None, "trouble": str(error)}


def _digest(path: str) -> str | None:
    """Return a digest of a file, or of the Python files in a folder; None if there is no such file."""
    digest = hashlib.sha256()
    try:
        for file in sorted(glob(f"{escape(path)}/**/*.py", recursive=True)) or [path]:
            digest.update(os.path.relpath(file, path).encode() + Path(file).read_bytes())
    except OSError:
        return None
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        globals()[sys.argv[1]]()
    else:  # as text, on another host
        answer(host(json.loads(sys.stdin.readline())))

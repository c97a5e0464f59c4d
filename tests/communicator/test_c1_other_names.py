"""Names of torch, of MPI and of older versions say which of ours to use, and `op=` takes torch's spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aiodist
from aiodist import Communicator, ReduceOp

OURS = {
    "all_reduce": "allreduce",
    "Allreduce": "allreduce",
    "Iallreduce": "allreduce",
    "all_gather": "allgather",
    "Allgatherv": "allgather",
    "reduce_scatter_tensor": "reduce_scatter",
    "Bcast": "broadcast",
    "all_to_all_single": "alltoall_single",
    "Ssend": r"send\(..., synchronous=True\)",
    "new_group": "group",
    "Get_rank": "rank",
    "empty": "arena_empty",
    "share_": "to_arena_",
}


@pytest.mark.ranks(1)
async def test_c1_another_name_says_ours(coll: Communicator) -> None:
    for name, ours in OURS.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use {ours}$"):
            getattr(coll, name)
        assert not hasattr(coll, name)
        assert name not in dir(coll)


@pytest.mark.ranks(1)
async def test_c1_dir_has_what_users_call(coll: Communicator) -> None:
    shown = {name for name in dir(coll) if not name.startswith("_")}
    assert {"allreduce", "is_root", "print", "rank"} <= shown
    assert not shown & {"parts", "upkeep", "admit", "leave_to_thread"}
    assert all(hasattr(coll, name) for name in shown - {"topology"})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: aiodist.init(report=1.0), r"init\(\) got report=: use report_after="),  # type: ignore[call-arg]
        (lambda: aiodist.start(lag=1.0), r"start\(\) got lag=: use report_lag_over="),  # type: ignore[call-arg]
        (lambda: aiodist.save("x", torch.nn.Linear(1, 1), own=[]), "use per_rank="),  # type: ignore[call-arg]
        (lambda: aiodist.save("x", torch.nn.Linear(1, 1), keep=1), "use keep_last="),  # type: ignore[call-arg]
        (lambda: aiodist.save("x", torch.nn.Linear(1, 1), extra=1), "use metadata="),  # type: ignore[call-arg]
        (lambda: aiodist.load("x", torch.nn.Linear(1, 1), own=[]), "use per_rank="),  # type: ignore[call-arg]
    ],
)
def test_c1_an_old_keyword_says_the_new_one(call: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("spelling", "op"), [("avg", "mean"), ("product", "prod")])
async def test_c2_operators_have_torchs_spellings_too(spelling: Any, op: Any, coll: Communicator) -> None:
    assert ReduceOp(spelling) is ReduceOp(op)
    asked = op if coll.rank == 0 else spelling  # ranks agree
    reductions: list[Any] = [coll.allreduce, coll.reduce, coll.scan, coll.exscan]
    for call in (*reductions, coll.reduce_scatter):
        made = [torch.arange(4.0) + coll.rank for _ in range(4)]
        assert str(await call(made[0], asked)) == str(await call(made[1], op))
        assert str(await call([made[2]], asked)) == str(await call([made[3]], op))
    for call in reductions:
        for number in (2.5, 3):
            assert await call(number, asked) == await call(number, op)
    with pytest.raises(ValueError, match="op='average': expected one of sum, mean"):
        coll.allreduce(torch.ones(1), "average")  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_c1_print_is_for_rank_0_alone(coll: Communicator, capsys: pytest.CaptureFixture[str]) -> None:
    assert coll.is_root == (coll.rank == 0)
    coll.print("from", coll.rank, sep=":", end="!")
    await coll.barrier()
    if coll.rank == 0:
        assert capsys.readouterr().out == "from:0!"

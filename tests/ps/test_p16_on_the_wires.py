"""P16: what travels is never unpickled by any transport; forged bytes run nothing either."""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aiodist import Communicator, ParameterServer
from aiodist.codecs import Json
from aiodist.errors import AiodistError, CommunicatorAborted
from aiodist.ps import Quorum, Synchronous
from aiodist.ps.wire import DONE, PUSH, Kind, Way
from tests.ps.frames import Entry, Frames

SECONDS = 20.0
LARGE = 70_000  # more than an entry carries
SIZES = (1, 100, LARGE)
TRANSPORTS = ("gloo", "shm", "mpi")
HARMLESS = ("coded push", "done")  # about unknown requests


class Poison:
    """Nothing can be unpickled while it is in force, by any name that pickle has."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.tried: list[str] = []
        originals = {
            id(getattr(module, name))
            for module in (pickle, sys.modules["_pickle"])
            for name in ("load", "loads", "_load", "_loads", "Unpickler", "_Unpickler")
            if hasattr(module, name)
        } | {id(torch.load)}
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in originals and module is not sys.modules["_pickle"]:
                    patch.setattr(module, name, self.refuse)
        if (mpi := sys.modules.get("mpi4py.MPI")) is not None:
            mpi.pickle.__init__(pickle.dumps, self.refuse)

    def refuse(self, *args: Any, **how: Any) -> Any:
        self.tried.append(f"{args!r:.80}")
        raise AssertionError("something was unpickled")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    poison = Poison(monkeypatch)
    with pytest.raises(AssertionError, match="something was unpickled"):
        pickle.loads(pickle.dumps(1))
    assert len(poison.tried) == 1, "it works"
    poison.tried.clear()
    yield poison
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None:
        mpi.pickle.__init__()
    assert not poison.tried


def values(numel: int, rank: int) -> list[torch.Tensor]:
    return [torch.full((numel,), rank + 1).to(kind) for kind in (torch.float32, torch.bfloat16, torch.int64)]


@pytest.mark.drawn(1)
@pytest.mark.ranks(3)
@pytest.mark.ranks(2, backend=TRANSPORTS)
@pytest.mark.parametrize("numel", SIZES)
async def test_p16_collectives_and_messages_unpickle_nothing(coll: Communicator, poison: Poison, numel: int) -> None:
    total = coll.size * (coll.size + 1) // 2
    for t in values(numel, coll.rank):
        assert (await coll.allreduce(t.clone())).unique().tolist() == [total]
        assert (await coll.broadcast(t.clone(), root=0)).unique().tolist() == [1]
        assert [int(part[0]) for part in await coll.allgather(t)] == list(range(1, coll.size + 1))
        after, before = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
        sent = coll.send(t, after, tag=3)
        assert (await coll.recv(torch.empty_like(t), before, tag=3))[0] == before + 1
        await sent
    await coll.barrier()
    inner = await coll.dup()
    await inner.barrier()
    await inner.aclose()
    assert not poison.tried


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend=TRANSPORTS)
@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("consistency", [None, Synchronous("sum"), Quorum(1, "sum")], ids=str)
async def test_p16_a_parameter_server_over_a_transport_unpickles_nothing(
    coll: Communicator, poison: Poison, servers: int | None, consistency: Any
) -> None:
    tensors = {"small": torch.zeros(5), "large": torch.zeros(LARGE), "cut": torch.zeros(1 << 19)}
    async with ParameterServer(coll, tensors, consistency=consistency, servers=servers, timeout=SECONDS) as ps:
        if ps.is_worker:
            await ps.init("meta", {"a": [None, 1, "x"]}, codec=Json())
            await ps.push_pull(None, [torch.ones_like(t) for t in tensors.values()])
            assert await ps.push_pull("meta", {"b": 40_000 * "x"}) == {"b": 40_000 * "x"}
            await ps.sync()
            await ps.barrier()
            expected = float(len(ps.workers))
            assert [t.unique().tolist() for t in await ps.pull(list(tensors))] == [[expected]] * 3
    assert not poison.tried


# --- crafted entries ---------------------------------------------------------------------------------------------


class Evil:
    """Makes a folder wherever it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def crafted(code: bytes) -> dict[str, tuple[int, bytes]]:
    """Return entries that carry `code` where a call, an answer, an order or a request is expected."""
    head = PUSH.pack(0, 0, Way.INLINE, True, 0, 0, 1.0, len(code), 0, 0)
    assert len(head) == PUSH.size
    return {
        "call": (Kind.CALL, code),
        "op": (Kind.CALL, b'{"op": "__reduce__", "n": 1}'),
        "json": (Kind.CALL, b"[" * 100),
        "answer": (Kind.ANSWER, code),
        "order": (Kind.ORDER, code),
        "push": (Kind.PUSH, code[:8]),
        "coded push": (Kind.PUSH, head + code),
        "pull": (Kind.PULL, code[:3]),
        "data": (Kind.DATA, code[:5]),
        "done": (Kind.DONE, DONE.pack(1 << 40, 1) + code),
        "kind": (99, code),
    }


@pytest.mark.drawn(7)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", crafted(b"0123456789"))
async def test_p16_a_crafted_message_runs_nothing_and_ends_at_most_the_server(
    coll: Communicator, poison: Poison, frames: Frames, tmp_path: Path, what: str
) -> None:
    """A wrong entry aborts the parameter server on all ranks, in time; the communicator continues."""
    mark = tmp_path / "it-ran"
    entry = crafted(pickle.dumps(Evil(mark)))[what]
    told: Exception | None = None
    reported: list[dict[str, Any]] = []
    if coll.rank == 0:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    try:
        async with ParameterServer(coll, {"w": torch.zeros(5)}, servers=[0], workers=[0, 1], timeout=SECONDS) as ps:
            if coll.rank == 1:

                def edit(src: int, dst: int, entries: list[Entry]) -> list[Entry]:
                    if src == 1:
                        frames.edit = None
                        entries.append(entry)
                    return entries

                frames.edit = edit
            for _ in range(3):
                await ps.push("w", torch.ones(5))
                await ps.barrier()
    except (AiodistError, ValueError, KeyError, struct.error) as error:
        told = error
    assert (told is None) == (what in HARMLESS), told
    assert told is None or coll.rank == 0 or isinstance(told, CommunicatorAborted)
    assert bool(reported) == (told is not None and coll.rank == 0), "the rank that it came to says so"
    assert not mark.exists()
    assert await coll.allreduce(1) == 2
    assert not poison.tried


@pytest.mark.ranks(2)
async def test_p16_what_is_said_to_be_json_is_read_as_json(
    coll: Communicator, poison: Poison, frames: Frames, tmp_path: Path
) -> None:
    """A peer pushes the code of a pickle to an object that its readers decode."""
    mark = tmp_path / "it-ran"
    async with ParameterServer(coll, servers=[0], workers=[0, 1]) as ps:
        await ps.init("notes", {"a": 1}, codec=Json())
        if coll.rank == 1:
            code = pickle.dumps(Evil(mark))

            def edit(src: int, dst: int, entries: list[Entry]) -> list[Entry]:
                ((_, body),) = entries
                key, rule, _, _, number, *_ = PUSH.unpack_from(body)
                return [(Kind.PUSH, PUSH.pack(key, rule, Way.INLINE, False, number, 0, 1.0, len(code), 0, 0) + code)]

            frames.edit = edit
            push = ps.push("notes", {"a": 2})
            frames.edit = None
            await push
            with pytest.raises(ValueError, match=r"JSON|utf-8|codec"):
                await ps.pull("notes", timeout=SECONDS)
    assert not mark.exists()
    assert not poison.tried

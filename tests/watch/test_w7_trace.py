"""W7: a timeline of all ranks on one clock: what is in it, and that it keeps the rules of its format."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import pytest
import torch
from torch import nn

import aiodist
from aiodist import Communicator, ConfigError, cli
from aiodist.data import prefetch
from aiodist.handles.tracing import tracing
from aiodist.nn import DataParallel
from aiodist.ps import ParameterServer
from aiodist.streams import HostStream
from aiodist.testing import run_ranks
from aiodist.testing.seams.channel import Channel
from aiodist.watch.clock import Clock, Offset
from aiodist.watch.merging import RankClock, merge, prepare
from aiodist.watch.trace import Recorder
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.trace_events import read, spans

pytestmark = pytest.mark.timeout(60)


async def shared(coll: Communicator, folder: Path) -> Path:
    """Return rank 0's folder on all ranks: processes have one each."""
    return Path(await coll.broadcast_object(str(folder)))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("gloo", "shm"))
async def test_w7_operations_of_all_ranks(coll: Communicator, tmp_path: Path) -> None:
    folder = await shared(coll, tmp_path)
    async with aiodist.trace(coll, folder):
        for n in (3, 1001):
            await coll.allreduce(torch.ones(n), impl="auto" if n == 3 else "ring")
        side = await coll.dup()
        handles = [side.allreduce(torch.ones(5)), side.allgather(torch.ones(7)), side.barrier()]
        await aiodist.gather(*handles)
        await coll.allreduce(torch.ones(2), name="mine")
        if coll.size > 1:
            right, left = (coll.rank + 1) % coll.size, (coll.rank - 1) % coll.size
            await aiodist.gather(coll.recv(torch.ones(4), src=left, tag=3), coll.send(torch.ones(4), dst=right, tag=3))
        await side.aclose()
    await coll.allreduce(1)  # not recorded
    await coll.barrier()
    events = read(folder)
    for rank in range(coll.size):
        world = spans(events, rank=rank, track="world")
        first, second, named = [e for e in world if e["name"] == "allreduce" and e["args"]["comm"] == "world"]
        assert (first["args"]["bytes"], second["args"]["bytes"], named["args"]["bytes"]) == (12, 4004, 8)
        assert (second["args"]["implementation"], named["args"]["called"]) == ("ring" if coll.size > 1 else "", "mine")
        assert f"{Path(__file__).name}:" in first["args"]["at"]
        assert first["cat"] == "operation"
        (gathered,) = [e for e in world if e["name"] == "allgather" and e["args"]["bytes"] == 28]
        assert gathered["args"]["comm"] == "world/dup1.0"
        messages = {e["name"]: e["args"]["peer"] for e in world if e["name"] in ("send", "recv")}
        right, left = (rank + 1) % coll.size, (rank - 1) % coll.size
        expected = {"recv": f"from rank {left} with tag 3", "send": f"to rank {right} with tag 3"}
        assert messages == (expected if coll.size > 1 else {})
    arrows = [e for e in events if e["ph"] == "f" and e["name"] == "allreduce"]
    assert len(arrows) == (5 if coll.size > 1 else 0)  # the close of `side` has one too


@pytest.mark.ranks(3)
async def test_w7_an_operation_says_for_whom_it_waited(coll: Communicator, tmp_path: Path) -> None:
    async with aiodist.trace(coll, tmp_path):
        await coll.barrier()
        if coll.rank == 1:
            await aiodist.gather(coll.recv_object(0), coll.recv_object(2))  # both have come
            async with HostStream("late") as stream:
                await stream.submit(int)
        handle = coll.allreduce(torch.ones(1))
        if coll.rank != 1:
            await coll.send_object(None, 1)
        await handle
    await coll.barrier()
    events = read(tmp_path)
    (late,) = spans(events, track="aiodist-late")
    waits = [spans(events, "allreduce", rank)[0]["args"] for rank in range(3)]
    assert late["pid"] == 1
    assert [args["last_rank"] for args in waits] == [1] * 3
    assert waits[1]["waited_us"] == 0
    assert min(waits[0]["waited_us"], waits[2]["waited_us"]) >= late["dur"]


@pytest.mark.ranks(2)
async def test_w7_a_training_its_data_and_a_parameter_server(coll: Communicator, tmp_path: Path) -> None:
    net = await DataParallel.create(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 1)), coll, bucket_bytes=200)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    async with ParameterServer(coll) as ps, aiodist.trace(coll, tmp_path):
        await ps.init("w", torch.zeros(3))
        async with prefetch([torch.ones(2, 6)] * 3, transform=lambda x: x * 2) as batches:
            async for x in batches:
                with aiodist.span("step", number=coll.rank):
                    await net.step(lambda x=x: net(x).mean(), opt)
        await ps.push("w", torch.ones(3))
        await ps.pull("w")
    await coll.barrier()
    events = read(tmp_path)
    for rank in range(2):
        compute = spans(events, rank=rank, track="aiodist-compute")
        for name in ("net.step", "forward", "backward", "optimizer"):
            assert len([e for e in compute if e["name"] == name]) == 3, name
        buckets = spans(events, rank=rank, track="reductions")
        assert sum(e["args"]["bytes"] for e in buckets) == 3 * 4 * (6 * 7 + 7 + 7 + 1)
        assert len(spans(events, "read", rank)) == 4  # the last finds the end
        assert len(spans(events, "transform", rank)) == 3
        assert [e["args"] for e in spans(events, "step", rank)] == [{"number": rank}] * 3
        server = [e["name"] for e in spans(events, rank=rank, track="parameter server")]
        assert (server.count("push"), server.count("pull")) == (1, 1)
        waits = {e["name"] for e in spans(events, rank=rank, track="waits")}
        assert "wait for net.step" in waits
    await net.aclose()


async def test_w7_copies_to_a_device(tmp_path: Path, simulated_cuda: SimulatedCuda) -> None:
    async with aiodist.init() as coll:
        async with aiodist.trace(coll, tmp_path), prefetch([torch.ones(1000)] * 2, device="cuda") as items:
            async for t in items:
                assert t.is_cuda
        copies = spans(read(tmp_path), track="copies")
    assert [(e["name"], e["args"]["bytes"]) for e in copies] == [("copy to device", 4000)] * 2


@pytest.mark.ranks(2)
async def test_w7_nothing_is_left_when_it_is_over(coll: Communicator, tmp_path: Path) -> None:
    assert tracing.to is None
    assert isinstance(aiodist.span("load"), nullcontext)
    async with aiodist.trace(coll, tmp_path):
        assert not isinstance(aiodist.span("load"), nullcontext)
        with pytest.raises(RuntimeError, match=f"rank {coll.rank} is traced already"):
            async with aiodist.trace(coll, tmp_path):
                pass
        left = coll.allreduce(torch.ones(3))
    await left
    await coll.barrier()
    assert tracing.to is None
    async with aiodist.trace(coll, tmp_path):  # anew
        pass
    await coll.barrier()
    assert {e["name"] for e in spans(read(tmp_path))} <= {"barrier", "wait for barrier"}


def test_w7_what_a_rank_raised_ends_the_block_and_its_file_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with aiodist.init() as coll, aiodist.trace(coll, tmp_path):
            await coll.allreduce(torch.ones(3))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_ranks(2, main)
    assert tracing.to is None
    assert not (tmp_path / "trace.json").exists()
    merged = merge(tmp_path)
    assert merged is not None
    assert (merged.ranks, merged.size) == ([0, 1], 2)
    assert spans(read(tmp_path), "allreduce")


@pytest.mark.ranks(1)
async def test_w7_a_folder_that_cannot_be_written_is_an_error_at_once(coll: Communicator, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"a trace cannot be written to .*: Not a directory"):
        async with aiodist.trace(coll, tmp_path / "file" / "trace"):
            pytest.fail("entered")
    assert tracing.to is None


def test_w7_a_disk_that_is_full_ends_the_trace_and_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rank-0.jsonl"
    file.symlink_to("/dev/full")
    full = Recorder.join(tmp_path, 0, 1)
    full.span("a", perf_counter())
    full.leave(0)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"{file}: the trace ends here: No space left on device"
    ]


# --- clocks and files -----------------------------------------------------------------------------------------------


class FarAway:
    """A channel to ranks whose clocks are ahead by `skews`, and whose answers take a while, not as long on each way."""

    def __init__(self, skews: dict[int, float], lost: tuple[int, ...] = ()) -> None:
        self.rank = 0
        self._skews = skews
        self._lost = lost
        self._count = 0
        self._heard: Callable[[int, Any], None] = lambda _, __: None

    def subscribe(self, topic: str, heard: Callable[[int, Any], None]) -> None:
        self._heard = heard

    def unsubscribe(self, topic: str) -> None: ...

    def send(self, rank: int, topic: str, message: list[Any]) -> None:
        self._count += 1
        there, back = 1e-4 * (1 + self._count % 7), 1e-4 * (1 + self._count % 3)
        loop = asyncio.get_running_loop()

        def arrive() -> None:
            answer = [*message, perf_counter() + self._skews[rank]]
            loop.call_later(back, self._heard, rank, answer)

        if rank not in self._lost:
            loop.call_later(there, arrive)


async def test_w7_clocks_are_compared_to_half_of_the_shortest_round_trip() -> None:
    skews = {1: 1234.5, 2: -0.25, 3: 0.0}
    clock = Clock(cast(Channel, FarAway(skews)), "clock", [0, 1, 2, 3])
    offsets = await clock.measure()
    assert offsets[0] == Offset(0.0, 0.0)
    for rank, skew in skews.items():
        assert abs(offsets[rank].seconds + skew) <= offsets[rank].error < 0.05


async def test_w7_a_rank_that_does_not_answer_has_no_known_clock() -> None:
    clock = Clock(cast(Channel, FarAway({1: 1.0, 2: 2.0}, lost=(2,))), "clock", [0, 1, 2])
    offsets = await clock.measure(timeout=0.1)
    assert abs(offsets[1].seconds + 1.0) <= offsets[1].error
    assert offsets[2].error == float("inf")


def test_w7_clocks_that_run_apart_are_followed_from_the_first_measurement_to_the_last() -> None:
    clock = RankClock([(100.0, 5.0), (200.0, 7.0)])
    assert clock.shared(95.0) == 100.0
    assert clock.shared(193.0) == pytest.approx(200.0)
    assert clock.shared(144.0) == pytest.approx(150.0, abs=0.05)
    assert clock.shared(0.0) == 5.0  # before, and after, as it was there
    assert clock.shared(400.0) == 407.0


def rank_file(folder: Path, rank: int, *lines: object, end: str = "") -> None:
    about = {"rank": rank, "size": 3, "host": "h", "process": 7}
    (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (about, *lines)) + end)


def test_w7_files_are_merged_by_one_clock_and_what_is_missing_is_named(tmp_path: Path) -> None:
    def collective(rank: int, began: float, seq: int) -> list[Any]:
        return [rank, "world", "allreduce", began, began + 0.5, {"comm": "world", "seq": seq}]

    offsets = {"offsets": {"0": [0.0, 0.0], "1": [-1000.0, 2e-5]}, "at": 10.0}
    rank_file(tmp_path, 0, offsets, [collective(0, 10.0, 0), collective(0, 12.0, 0)])  # twice: two worlds
    rank_file(tmp_path, 1, [collective(1, 1010.25, 0), collective(1, 1012.0, 1)], end='[[1, "world", "allr')
    merged = merge(tmp_path)
    assert merged is not None
    assert (merged.ranks, merged.size, merged.error) == ([0, 1], 3, 2e-5)
    assert "2 ranks, clocks to 20 us; no records of ranks [2]" in str(merged)
    events = read(tmp_path)
    assert [(e["pid"], e["ts"]) for e in spans(events)] == [(0, 0.0), (1, 250e3), (0, 2e6), (1, 2e6)]
    first, last = spans(events)[:2]
    assert (first["args"]["last_rank"], first["args"]["waited_us"]) == (1, 250e3)
    assert (last["args"]["last_rank"], last["args"]["waited_us"]) == (1, 0.0)
    assert [e["ph"] for e in events if e["ph"] in "stf"] == ["s", "f"]
    prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert merge(tmp_path) is None


def test_w7_what_no_rank_has_written_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, text in enumerate((b'{"rank": 0}\n', b"5\n", b"\xff\xfe\n[[1]]\n", b"\0\0")):
        (tmp_path / f"rank-{number}.jsonl").write_bytes(text)
    assert merge(tmp_path) is None
    rank_file(tmp_path, 1, [[1, "t", "a", 0, 10, {}]])
    merged = merge(tmp_path)
    assert merged is not None
    assert merged.ranks == [1]


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_w7_a_folder_without_a_trace_is_an_error(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aiodist", "trace", str(tmp_path / folder)])
    assert cli.main() == 2
    assert f"no rank has recorded anything in {tmp_path / folder}" in capsys.readouterr().err


def test_w7_what_overlaps_lies_on_rows_of_its_own(tmp_path: Path) -> None:
    lines = [[0, "t", n, b, e, {}] for n, b, e in [("a", 0, 10), ("in a", 1, 3), ("in a too", 3, 9), ("b", 5, 12)]]
    lines += [[0, "t", "op", 1, 2, {"comm": "c"}]]  # an operation is no part of the spans around it
    rank_file(tmp_path, 0, lines)
    merge(tmp_path)
    rows = {e["name"]: e["tid"] for e in spans(read(tmp_path))}
    assert rows["a"] == rows["in a"] == rows["in a too"]
    assert rows["a"] != rows["b"] == rows["op"]

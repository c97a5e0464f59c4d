"""`bench gpu`: its cases run on simulated devices, so that their code has run before it meets a GPU."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist.backends import nccl
from aiodist.bench import peers
from aiodist.bench.plan import Plan
from aiodist.bench.session import Session
from aiodist.launch import commands as launcher
from aiodist.testing import run_ranks
from benchmarks import __main__ as command
from benchmarks import (
    gpu,
    gpu_cases,
    gpu_reductions,
    gpu_report,
    gpu_training,
    gpu_turns,
    gpu_waits,
    gpu_worker,
)
from benchmarks.gpu import Limits, Run
from benchmarks.gpu_cases import CASES, QUICK, Case, Figure, Measured, Sizes, State, Todo
from benchmarks.gpu_notes import read_notes
from benchmarks.gpu_turns import Bench, NotPossible, WrongResult
from tests.support.fake_nccl.core import FakeNccl
from tests.support.simulated_cuda.device import SimulatedCuda, active
from tests.support.simulated_cuda.simulation import simulated_cuda

TINY = replace(
    QUICK, allreduce_bytes=4 << 10, ahead=1e-4, long_kernel=1e-2, waits=5, flight=3, width=8, layers=1, batches=3,
    rounds=1, batch=1, seconds=0.0, samples=1, wake=0.0,
)  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """One device with all that the cases call."""
    with simulated_cuda(devices=1, delay=2e-5) as device:
        monkeypatch.setattr(torch.cuda, "_sleep", spin)
        monkeypatch.setattr(gpu_training, "CHECKED", replace(TINY, words=9, window=3))
        yield device
        assert not device.hazards


def spin(cycles: int) -> None:
    """As the kernel of that name, at 20 GHz."""
    active().current_stream().lane.put(partial(time.sleep, cycles / 20e9))


def measured(name: str, sizes: Sizes = TINY) -> list[Measured]:
    """Measure a case with its ranks in this process."""
    case = CASES[name]

    async def main() -> Measured:
        async with aiodist.init() as coll:
            bench = Bench(Session(Plan("gpu", coll.size, (), ()), coll, (), (), coll.barrier), sizes)
            return await gpu_worker.measure_case(bench, case)

    return run_ranks(case.ranks or 2, main, timeout=None)


def check_values(name: str, result: Measured) -> None:
    case = CASES[name]
    assert set(result.values) == {line.name for line in case.lines}
    assert all(math.isfinite(value) for value in result.values.values())


# --- the cases ------------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["await", "parked", "wait_stream", "train", "prefetch"])
def test_s2_bench_gpu_cases_of_one_rank_run(name: str, device: SimulatedCuda) -> None:
    (result,) = measured(name)
    check_values(name, result)


def test_s2_bench_gpu_the_kernel_is_what_was_measured(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock went down since it was measured: kernels take 500 times as long as they should."""
    monkeypatch.setattr(gpu_waits, "spin_rate", lambda wake: 500 * 20e9)
    (result,) = measured("await", replace(TINY, ahead=1e-6))
    took = {record.impl: record.seconds or 0.0 for record in result.records}
    assert took["kernel"] >= 500 * TINY.kernel
    assert result.values == {name: (took[name] - took["kernel"]) * 1e6 for name in ("await", "blocking")}


class Waking:
    """A device whose clock changes while it works; by default up to 2 GHz, by its thirtieth kernel."""

    def __init__(
        self, hertz: Callable[[int], float] = lambda kernels: 2e9 * min(1.0, 0.2 + 0.8 * kernels / 30)
    ) -> None:
        self.hertz = hertz
        self.kernels = 0
        self.now = 0.0

    def sleep(self, cycles: int) -> None:
        self.kernels += 1
        self.now += cycles / self.hertz(self.kernels)

    def event(self, *, enable_timing: bool) -> Any:
        return _Event(self)


class _Event:
    def __init__(self, device: Waking) -> None:
        self.device = device
        self.at = 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return (end.at - self.at) * 1e3


def spin_rate_of(waking: Waking, wake: float, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(torch.cuda, "_sleep", waking.sleep)
    monkeypatch.setattr(torch.cuda, "Event", waking.event)
    return gpu_turns.spin_rate(wake)


@pytest.mark.parametrize("wake", [0.2, 0.0])
def test_s2_bench_gpu_kernels_are_timed_at_the_full_clock(monkeypatch: pytest.MonkeyPatch, wake: float) -> None:
    """After a while of work, and where that is not enough as soon as the clock rises no more."""
    waking = Waking()
    assert spin_rate_of(waking, wake, monkeypatch) == pytest.approx(2e9, rel=0.01)
    assert wake or 30 < waking.kernels <= 50


def test_s2_bench_gpu_a_clock_that_never_rests_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = Waking(lambda kernels: 2e9 / 1.1**kernels)
    assert spin_rate_of(falling, 0.0, monkeypatch) == pytest.approx(2e9 / 1.1**48)


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for torch's process group, of which a process has one: it blocks, which ranks of one thread may not."""

    @asynccontextmanager
    async def opened(names: list[str], coll: aiodist.Communicator) -> AsyncIterator[None]:
        assert names == ["gloo"]
        yield

    async def by_gloo(bench: Bench, ts: Sequence[torch.Tensor]) -> None:
        for t in ts:
            await bench.coll.allreduce(t, impl="ring")

    monkeypatch.setattr(gpu_reductions, "opened", opened)
    monkeypatch.setattr(gpu_reductions, "by_gloo", by_gloo)
    monkeypatch.setattr(gpu_training, "opened", opened)
    monkeypatch.setattr(gpu_training, "by_ddp", lambda bench, model: gpu_training.plain_loop(model))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["allreduce_2", "allreduce_4", "train_4"])
def test_s2_bench_gpu_cases_of_several_ranks_run(name: str, device: SimulatedCuda, gloo: None) -> None:
    first, *others = measured(name)
    check_values(name, first)
    assert all(not other.records for other in others)
    assert {record.ranks for record in first.records} == {CASES[name].ranks}


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch, device: SimulatedCuda) -> Iterator[FakeNccl]:
    library = FakeNccl()
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "load", lambda: nccl.Library(library))
    monkeypatch.setattr(nccl, "unconnectable", lambda places, found, shared: None)  # it is told that ranks may share
    yield library
    assert not library.violations


@pytest.mark.parametrize("name", ["nccl_overhead", "nccl_2"])
def test_s2_bench_gpu_beside_nccl(name: str, fake_nccl: FakeNccl) -> None:
    first, *_ = measured(name)
    check_values(name, first)
    assert fake_nccl.communicators
    took = {record.impl: record.seconds or 0.0 for record in first.records}
    for way in ("await", "issue", "flight") if name == "nccl_overhead" else ():  # beside NCCL's own calls
        assert first.values[way] == pytest.approx((took[f"aiodist:{way}"] - took[f"nccl4py:{way}"]) * 1e6)


@pytest.mark.parametrize("name", ["nccl_overhead", "nccl_2"])
def test_s2_bench_gpu_says_why_nccl_is_not_there(name: str, device: SimulatedCuda) -> None:
    with pytest.raises(NotPossible, match="this one is simulated"):
        measured(name)


def test_s2_bench_gpu_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated_cuda(devices=2, delay=2e-5):
        first, _ = measured("allreduce_devices")
    assert set(first.values) == {"staged"}
    assert "this one is simulated" in first.missing["nccl"]
    (without, with_value) = gpu_cases.figures(CASES["allreduce_devices"], first.values, first.missing)
    assert (without.state, with_value.state) == (State.NOT_POSSIBLE, State.SEEN)


def test_s2_bench_gpu_results_are_looked_at(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that goes on too soon, or computes something else, is refused."""

    async def too_soon(first: Any, second: Any) -> None: ...

    monkeypatch.setattr(gpu_waits, "waited_for", too_soon)
    with pytest.raises(WrongResult, match="is nan, expected"):
        measured("wait_stream", replace(TINY, ahead=20e-3))
    torch.cuda.synchronize()  # what it had queued uses memory that was given back
    device.hazards.clear()

    def twice(net: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())
        return loss if net(x).dtype is torch.float64 else 2 * loss

    monkeypatch.setattr(gpu_training, "loss", twice)
    with pytest.raises(WrongResult, match="after 3 steps"):
        measured("train")


def test_s2_bench_gpu_checks_every_element() -> None:
    expected = torch.arange(10.0, dtype=torch.float64)
    gpu_turns.check("t", expected.float(), expected, rtol=1e-6, atol=0.0)
    wrong = expected.float()
    wrong[3] = float("nan")
    with pytest.raises(WrongResult, match="t: 1 of 10 elements are wrong; number 3 is nan, expected 3"):
        gpu_turns.check("t", wrong, expected, rtol=1e-6, atol=0.0)
    with pytest.raises(WrongResult, match="expected"):
        gpu_turns.check("t", wrong[:5], expected, rtol=1e-6, atol=0.0)


def test_s2_bench_gpu_gloo_reduces_what_lies_on_a_device(device: SimulatedCuda) -> None:
    """The way itself, on the one rank that a process can have in a group of torch's."""

    async def main() -> list[float]:
        async with aiodist.init() as coll, peers.opened(["gloo"], coll):
            session = Session(Plan("gpu", 1, (), ()), coll, (), (), coll.barrier)
            ts = [torch.full((3,), 2.0, device=coll.device) for _ in range(2)]
            await gpu_reductions.by_gloo(Bench(session, TINY), ts)
            found: list[float] = torch.cat(ts).tolist()
            return found

    assert run_ranks(1, main) == [[2.0] * 6]


# --- what the ranks write down ------------------------------------------------------------------------------


def test_s2_bench_gpu_worker_notes_each_case(
    device: SimulatedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_cases, "QUICK", TINY)
    cases = ("parked", "nccl_overhead", "wait_stream")
    until = time.time() + 10_000
    run_ranks(1, partial(gpu_worker.measure, Todo(cases, str(tmp_path), until, quick=True)), timeout=None)
    notes = read_notes(tmp_path)
    assert notes.machine["device"] == "simulated CUDA device 0"
    assert (notes.began, notes.running) == (set(cases), None)
    assert set(notes.results["parked"]["values"]) == {"cpu"}
    assert "this one is simulated" in notes.results["nccl_overhead"]["not_possible"]
    assert notes.results["wait_stream"]["records"]


def test_s2_bench_gpu_worker_begins_nothing_that_may_end_too_late(device: SimulatedCuda, tmp_path: Path) -> None:
    todo = Todo(("parked",), str(tmp_path), time.time() + 5, quick=True)
    run_ranks(1, partial(gpu_worker.measure, Todo.from_json(todo.to_json())), timeout=None)
    assert "it may take 15" in read_notes(tmp_path).results["parked"]["late"]


def test_s2_bench_gpu_worker_tells_who_failed(
    device: SimulatedCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(bench: Bench) -> Measured:
        if bench.coll.rank == 1:
            raise ValueError("too hot")
        await bench.coll.barrier()
        return Measured()

    monkeypatch.setattr(gpu_reductions, "beside_copies", fails)
    todo = Todo(("allreduce_2",), str(tmp_path), time.time() + 10_000, quick=True)
    with pytest.raises(ValueError, match="too hot"):
        run_ranks(2, partial(gpu_worker.measure, todo), timeout=None)
    assert read_notes(tmp_path).error_of("allreduce_2") == "rank 1: ValueError: too hot"


def test_s2_bench_gpu_notes_that_are_cut_off(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"case": "await", "began": 5.0}\n{"case": "await", "val')
    (tmp_path / "1.jsonl").write_text(
        '{"case": "await", "error": "PeerLost: rank 2", "peers": true}\n{"case": "await", "began": 6.0}\n'
    )
    (tmp_path / "2.jsonl").write_text('{"case": "await", "error": "ValueError: no", "peers": false}\n')
    notes = read_notes(tmp_path)
    assert (notes.running, notes.results) == (("await", 5.0), {})
    assert notes.error_of("await") == "rank 2: ValueError: no"
    assert notes.error_of("parked") is None


# --- the command --------------------------------------------------------------------------------------------------


Job = Callable[[Todo], Awaitable[int]]


class Jobs:
    """Stands in for the launcher: each job does what a function says."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs = list(jobs)
        self.seen: list[tuple[tuple[str, ...], int, bool, bool]] = []

    def __call__(self, todo: Todo, ranks: int, *, shares: bool, together: bool) -> Awaitable[int]:
        self.seen.append((todo.cases, ranks, shares, together))
        return (self.jobs.pop(0) if self.jobs else all_well)(todo)


def say(todo: Todo, **event: Any) -> None:
    with (Path(todo.folder) / "0.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def well(todo: Todo, name: str) -> None:
    say(todo, case=name, began=time.time())
    values = {line.name: line.target if line.target is not None else 1.0 for line in CASES[name].lines}
    say(todo, case=name, values=values, missing={}, records=[{"op": name}])


async def all_well(todo: Todo) -> int:
    say(todo, machine={"device": "H200"})
    for name in todo.cases:
        well(todo, name)
    return 0


def run_of(*names: str, jobs: Jobs, devices: int = 1, seconds: float = 1000.0, limits: Limits | None = None) -> Run:
    cases = [CASES[name] for name in names]
    limits = limits or Limits(look=0.005)
    return Run(cases, devices, time.time() + seconds, quick=True, start=jobs, limits=limits)


def states(found: list[Figure]) -> dict[str, set[str]]:
    said: dict[str, set[str]] = {}
    for figure in found:
        said.setdefault(figure.case, set()).add(str(figure.state))
    return said


def test_s2_bench_gpu_groups_cases_by_job() -> None:
    jobs = Jobs()
    run = run_of(*CASES, jobs=jobs, devices=3)
    found = asyncio.run(run.all())
    assert [figure.case for figure in found] == [case.name for case in CASES.values() for _ in case.lines]
    assert {figure.state for figure in found} == {State.REACHED, State.SEEN}
    assert jobs.seen == [
        (("await", "parked", "wait_stream", "nccl_overhead", "train", "prefetch"), 1, False, True),
        (("allreduce_2",), 2, False, True),
        (("allreduce_4", "train_4"), 4, False, True),
        (("nccl_2",), 2, True, True),
        (("nccl_4",), 4, True, True),
        (("allreduce_devices",), 3, False, False),
    ]
    assert [record["op"] for record in run.records] == list(CASES)


def test_s2_bench_gpu_goes_on_after_a_crash() -> None:
    async def crashes(todo: Todo) -> int:
        well(todo, "await")
        say(todo, case="parked", began=time.time())
        return 139

    async def fails(todo: Todo) -> int:
        say(todo, case="wait_stream", began=time.time())
        say(todo, case="wait_stream", error="ValueError: no", peers=False)
        return 1

    jobs = Jobs(crashes, fails)
    found = asyncio.run(run_of("await", "parked", "wait_stream", "train", jobs=jobs).all())
    assert states(found) == {
        "await": {"yes", "no target"}, "parked": {"FAILED"}, "wait_stream": {"FAILED"}, "train": {"yes"},
    }  # fmt: skip
    why = {figure.case: figure.why for figure in found}
    assert "exit code 139" in why["parked"]
    assert why["wait_stream"] == "rank 0: ValueError: no"
    assert [cases for cases, *_ in jobs.seen][1:] == [("wait_stream", "train"), ("train",)]


def test_s2_bench_gpu_ends_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    async def hangs(todo: Todo) -> int:
        say(todo, case="allreduce_4", began=time.time() - CASES["allreduce_4"].seconds)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(todo.cases)
        return 0

    async def never_begins(todo: Todo) -> int:
        await asyncio.Event().wait()
        return 0

    async def main() -> list[Figure]:
        jobs = Jobs(hangs, all_well, never_begins)
        limits = Limits(start=0.02, grace=0.02, look=0.005)
        async with asyncio.timeout(10):
            return await run_of("allreduce_4", "train_4", "nccl_2", jobs=jobs, limits=limits).all()

    found = asyncio.run(main())
    assert states(found) == {"allreduce_4": {"FAILED"}, "train_4": {"yes"}, "nccl_2": {"FAILED"}}
    assert ended == [("allreduce_4", "train_4")]
    assert "not over after" in found[0].why
    assert "had not begun" in found[-1].why


def test_s2_bench_gpu_stops_where_it_is_told_to() -> None:
    async def stopped(todo: Todo) -> int:
        say(todo, case="await", began=time.time())
        return 130

    jobs = Jobs(stopped)
    found = asyncio.run(run_of("await", "parked", "nccl_2", jobs=jobs).all())
    assert states(found) == {"await": {"FAILED"}, "parked": {"not measured"}, "nccl_2": {"not measured"}}
    assert len(jobs.seen) == 1


def test_s2_bench_gpu_tells_ranks_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    async def run(one: launcher.Job) -> int:
        started.append(one)
        return 0

    monkeypatch.setattr("aiodist.launch.job.run", run)
    todo = Todo(("nccl_2",), "folder", 5.0, quick=True)

    async def main() -> None:
        start = gpu.Jobs("none", "GPU-a")
        await start(todo, 2, shares=True, together=True)
        await start(todo, 8, shares=False, together=False)

    asyncio.run(main())
    assert [(one.ranks, one.mpi, one.prefix) for one in started] == [(2, "none", False), (8, "none", False)]
    assert started[0].exports == ("NCCL_MULTI_RANK_GPU_ENABLE=1", "CUDA_VISIBLE_DEVICES=GPU-a")
    assert started[1].exports == ("NCCL_MULTI_RANK_GPU_ENABLE=0",)
    assert started[0].command[:2] == ("-m", gpu_worker.__name__)
    assert Todo.from_json(started[0].command[2]) == todo


def test_s2_bench_gpu_begins_nothing_without_time() -> None:
    jobs = Jobs()
    found = asyncio.run(run_of("await", "train_4", jobs=jobs, seconds=30.0).all())
    assert states(found) == {"await": {"yes", "no target"}, "train_4": {"not measured"}}
    assert len(jobs.seen) == 1


def test_s2_bench_gpu_cannot_start_its_ranks() -> None:
    async def refused(todo: Todo) -> int:
        raise aiodist.LaunchError("no guard")

    found = asyncio.run(run_of("await", "parked", jobs=Jobs(refused)).all())
    assert states(found) == {"await": {"FAILED"}, "parked": {"FAILED"}}
    assert {figure.why for figure in found} == {"no guard"}


def test_s2_bench_gpu_the_whole_command(
    device: SimulatedCuda,
    fake_nccl: FakeNccl,
    outside: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Jobs()
    monkeypatch.setattr(gpu, "Jobs", lambda mpi, first: jobs)
    file = tmp_path / "out.json"
    assert command.main(["gpu", "--quick", "--json", str(file)]) == 0
    assert len(jobs.seen) == 5  # there is one device
    written = json.loads(file.read_text())
    assert written["machine"] == {"device": "H200"}
    names = [name for name in CASES if name != "allreduce_devices"]
    assert list(dict.fromkeys(figure["case"] for figure in written["figures"])) == names
    assert [record["op"] for record in written["records"]] == names
    printed = capsys.readouterr().out
    assert "targets reached: 15" in printed
    assert "device H200" in printed

    async def fails(todo: Todo) -> int:
        return 1

    jobs.jobs.append(fails)
    assert command.main(["gpu", "--only", "parked"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("release", [(2, 28, 9), None])
def test_s2_bench_gpu_starts_no_ranks_that_nccl_does_not_connect(
    device: SimulatedCuda,
    outside: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    release: tuple[int, ...] | None,
) -> None:
    """What it says is what the ranks would have said."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    why = "nccl is not possible here: NCCL needs a CUDA device, and this one is simulated"
    if release is not None:
        library = FakeNccl()
        library.release = release
        monkeypatch.setattr(nccl, "missing", lambda: None)
        monkeypatch.setattr(nccl, "load", lambda: nccl.Library(library))
        why = "NCCL 2.28.9 allows one rank per device, 2.30 and later allow more"
    jobs = Jobs()
    monkeypatch.setattr(gpu, "Jobs", lambda mpi, first: jobs)
    file = tmp_path / "out.json"
    assert command.main(["gpu", "--only", "parked,nccl_2,nccl_4", "--json", str(file)]) == 0
    assert [cases for cases, *_ in jobs.seen] == [("parked",)]
    said = {figure["case"]: figure for figure in json.loads(file.read_text())["figures"]}
    assert [said[name]["state"] for name in ("parked", "nccl_2", "nccl_4")] == ["yes", *["not possible here"] * 2]
    assert why in said["nccl_2"]["why"]
    with pytest.raises(NotPossible) as raised:
        measured("nccl_2")
    assert str(raised.value) == said["nccl_2"]["why"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", "walk"], "--only walk: expected some of await"),
        (["--only", "allreduce_devices"], "it takes several CUDA devices, and one is here"),
        (["--json", "/nowhere/at/all.json"], "expected a file that can be written"),
    ],
)
def test_s2_bench_gpu_bad_arguments(
    device: SimulatedCuda,
    outside: None,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    assert command.main(["gpu", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_s2_bench_gpu_without_a_device(outside: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["gpu"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


def judged(case: Case, value: float) -> str:
    (figure,) = gpu_cases.figures(case, {case.lines[0].name: value})
    return str(figure.state)


def test_s2_bench_gpu_judges() -> None:
    assert [judged(CASES["train_4"], value) for value in (1.5, 1.49, float("nan"))] == ["yes", "NO", "NO"]
    assert [judged(CASES["train"], value) for value in (1.03, 1.04, float("nan"))] == ["yes", "NO", "NO"]
    (lost,) = gpu_cases.figures(CASES["train"], {})
    assert lost.state is State.FAILED


def test_s2_bench_gpu_table_shows_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    found = gpu_cases.without_value(CASES["nccl_2"], State.NOT_POSSIBLE, "nccl4py is [not] installed")
    found += gpu_cases.figures(CASES["train"], {"datapar": 1.5})
    found += gpu_cases.without_value(CASES["allreduce_2"], State.FAILED, "it burnt")
    gpu_report.show({"device": "H200"}, found, width=110, colour=False)
    printed = capsys.readouterr().out
    assert "nccl4py is [not] installed" in printed
    assert "1.5 x" in printed
    assert printed.count("it burnt") == 1  # of its four lines
    assert "missed: 1, not possible here: 1, failed: 4" in printed

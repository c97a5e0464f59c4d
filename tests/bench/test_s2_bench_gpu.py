"""`benchmarks gpu`: its cases run on simulated devices, so that their code has run before it meets a GPU."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist.backends import nccl
from aiodist.bench import peers
from aiodist.bench.records import dumps
from aiodist.bench.session import Session
from aiodist.launch import commands as launcher
from aiodist.testing import run_ranks
from benchmarks import __main__ as command
from benchmarks import gpu, gpu_reductions, gpu_training, gpu_turns
from benchmarks.figures import Figure, figures
from benchmarks.gpu import CASES, verdicts
from benchmarks.gpu_turns import QUICK, Bench, WrongResult
from benchmarks.suite import Study
from tests.support.fake_nccl.core import FakeNccl
from tests.support.simulated_cuda.device import SimulatedCuda, active
from tests.support.simulated_cuda.simulation import simulated_cuda

TINY = replace(
    QUICK, allreduce_bytes=4 << 10, ahead=1e-4, long_kernel=1e-2, waits=5, flight=3, width=8, layers=1, batches=3,
    rounds=1, batch=1, samples=1, wake=0.0,
)  # fmt: skip


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    """One device with all that the cases call."""
    with simulated_cuda(devices=1, delay=2e-5) as device:
        monkeypatch.setattr(torch.cuda, "_sleep", spin)
        yield device
        assert not device.hazards


def spin(cycles: int) -> None:
    """Stands in for the kernel of that name, at 20 GHz."""
    active().current_stream().lane.put(partial(time.sleep, cycles / 20e9))


def measured(monkeypatch: pytest.MonkeyPatch, name: str) -> list[list[Figure]]:
    """Measure a case with its ranks in this process."""
    case = CASES[name]
    monkeypatch.setattr(gpu_turns, "QUICK", TINY)
    plan = Study(name, case.ranks or 2, (), (), own={"quick": True})

    async def main() -> list[Figure]:
        async with aiodist.init() as coll:
            return figures(await import_module(case.module).measure(Session(plan, coll, (), (), coll.barrier)))

    return run_ranks(plan.ranks, main, timeout=None)


def values(name: str, records: list[Figure]) -> dict[str, float]:
    return {record.impl: record.value for record in records if record.op == name and record.value is not None}


def check_values(name: str, records: list[Figure]) -> None:
    found = values(name, records)
    assert set(found) == set(CASES[name].figures)
    assert all(math.isfinite(value) for value in found.values())


# --- the cases ------------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ["await", "parked", "wait_stream", "train", "prefetch"])
def test_s2_bench_gpu_cases_of_one_rank_run(name: str, device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    (records,) = measured(monkeypatch, name)
    check_values(name, records)


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
    """Stand-ins for torch's process group, which blocks: ranks of one thread may not."""

    async def by_gloo(bench: Bench, ts: Sequence[torch.Tensor]) -> None:
        for t in ts:
            await bench.coll.allreduce(t, impl="ring")

    monkeypatch.setattr(gpu_reductions, "by_gloo", by_gloo)
    monkeypatch.setattr(gpu_training, "by_ddp", lambda bench: gpu_training.plain_loop(model(bench)))


def model(bench: Bench) -> torch.nn.Module:
    return gpu_training.Language(TINY).to(bench.device, torch.bfloat16)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["allreduce_2", "allreduce_4", "train_4"])
def test_s2_bench_gpu_cases_of_several_ranks_run(
    name: str, device: SimulatedCuda, gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = measured(monkeypatch, name)
    check_values(name, first)
    assert not any(others)
    assert {record.ranks for record in first} == {CASES[name].ranks}


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch, device: SimulatedCuda) -> Iterator[FakeNccl]:
    library = FakeNccl()
    monkeypatch.setattr(nccl, "missing", lambda: None)
    monkeypatch.setattr(nccl, "load", lambda: nccl.Library(library))
    monkeypatch.setattr(nccl, "unconnectable", lambda places, found, shared: None)  # ranks may share a device
    yield library
    assert not library.violations


@pytest.mark.parametrize("name", ["nccl_overhead", "nccl_2"])
def test_s2_bench_gpu_and_nccl(name: str, fake_nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_ = measured(monkeypatch, name)
    check_values(name, first)
    assert fake_nccl.communicators
    took = {record.impl: record.seconds or 0.0 for record in first}
    for way in ("await", "issue", "flight") if name == "nccl_overhead" else ():  # compared with NCCL's own calls
        assert values(name, first)[way] == pytest.approx((took[f"aiodist:{way}"] - took[f"nccl4py:{way}"]) * 1e6)


@pytest.mark.parametrize("name", ["nccl_overhead", "nccl_2"])
def test_s2_bench_gpu_says_why_nccl_is_missing(
    name: str, device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(aiodist.BackendUnavailable, match="this one is simulated"):
        measured(monkeypatch, name)


def test_s2_bench_gpu_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "allreduce_devices"
    with simulated_cuda(devices=2, delay=2e-5):
        first, _ = measured(monkeypatch, name)
    assert set(values(name, first)) == {"staged"}
    without, with_value = verdicts(CASES[name], [record.to_dict() for record in first], "not possible here")
    assert (without.reached, without.why) == (False, "not possible here")
    assert with_value.reached


def test_s2_bench_gpu_checks_every_element(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.arange(10.0, dtype=torch.float64)
    gpu_turns.check("t", expected.float(), expected, rtol=1e-6, atol=0.0)
    wrong = expected.float()
    wrong[3] = float("nan")
    with pytest.raises(WrongResult, match="t: 1 of 10 elements are wrong; number 3 is nan, expected 3"):
        gpu_turns.check("t", wrong, expected, rtol=1e-6, atol=0.0)

    def by_nothing(bench: Bench, impl: str) -> Callable[..., Awaitable[None]]:
        async def reduce(ts: Sequence[torch.Tensor]) -> None: ...

        return reduce

    monkeypatch.setattr(gpu_reductions, "by_aiodist", by_nothing)
    with pytest.raises(WrongResult, match="allreduce of 2 ranks by cuda_ipc"):
        measured(monkeypatch, "allreduce_2")
    torch.cuda.synchronize()
    device.hazards.clear()


def test_s2_bench_gpu_gloo_reduces_tensors_on_a_device(device: SimulatedCuda) -> None:
    """gloo itself, on the one rank that a process can have in a group of torch's."""

    async def main() -> list[float]:
        async with aiodist.init() as coll, peers.opened(["gloo"], coll):
            session = Session(Study("gpu", 1, (), ()), coll, (), (), coll.barrier)
            ts = [torch.full((3,), 2.0, device=coll.device) for _ in range(2)]
            await gpu_reductions.by_gloo(Bench(session, TINY), ts)
            found: list[float] = torch.cat(ts).tolist()
            return found

    assert run_ranks(1, main) == [[2.0] * 6]


# --- the command --------------------------------------------------------------------------------------------------


class Jobs:
    """Stands in for the launcher: each job ends with an exit code, after rank 0 wrote its figures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **codes: int) -> None:
        self.codes = codes
        self.seen: list[launcher.Job] = []
        monkeypatch.setattr("aiodist.launch.job.run", self.run)

    async def run(self, job: launcher.Job) -> int:
        self.seen.append(job)
        plan = Study.from_json(job.command[-1])
        if code := self.codes.get(plan.op, 0):
            return code
        figures = CASES[plan.op].figures
        targets = {name: 1.0 if one.target is None else one.target for name, one in figures.items()}
        self.write(plan, [Figure(plan.op, name, 1, value=value) for name, value in targets.items()])
        return 0

    def write(self, plan: Study, records: list[Figure]) -> None:
        assert plan.json is not None
        Path(plan.json).write_text(dumps(records))

    @property
    def names(self) -> list[str]:
        return [Study.from_json(job.command[-1]).op for job in self.seen]


def run(*names: str, seconds: float = 10_000.0) -> dict[str, str]:
    """Run cases; return a state of each: its reason for missing values, or yes or no."""
    plans = [Study(name, CASES[name].ranks or 3, ("auto",), (), module=CASES[name].module) for name in names]
    found, _ = asyncio.run(gpu.measured(plans, time.monotonic() + seconds, "none", "GPU-a"))
    return {
        name: one[0].why or ("yes" if all(verdict.reached for verdict in one) else "no") for name, one in found.items()
    }


def test_s2_bench_gpu_starts_a_job_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch)
    assert run(*CASES) == dict.fromkeys(CASES, "yes")
    assert jobs.names == list(CASES)
    by_name = dict(zip(jobs.names, jobs.seen, strict=True))
    assert by_name["nccl_2"].exports == ("NCCL_MULTI_RANK_GPU_ENABLE=1", "CUDA_VISIBLE_DEVICES=GPU-a")
    assert by_name["train_4"].exports == ("NCCL_MULTI_RANK_GPU_ENABLE=0", "CUDA_VISIBLE_DEVICES=GPU-a")
    several = by_name["allreduce_devices"]
    assert (several.exports, several.ranks, several.mpi) == (("NCCL_MULTI_RANK_GPU_ENABLE=0",), 3, "none")
    assert all(job.timeout for job in jobs.seen)


def test_s2_bench_gpu_continues_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, parked=139, wait_stream=2)
    assert run("await", "parked", "wait_stream", "train") == {
        "await": "yes",
        "parked": "FAILED: the ranks ended with exit code 139",
        "wait_stream": "not possible here",
        "train": "yes",
    }
    assert len(jobs.seen) == 4


def test_s2_bench_gpu_stops_after_a_signal_and_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = Jobs(monkeypatch, **{"await": 130})
    found = run("await", "parked")
    assert found["parked"].startswith("not measured: it could take ")
    assert run("train", seconds=30.0)["train"].startswith("not measured")
    assert jobs.names == ["await"]


def test_s2_bench_gpu_cannot_start_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(job: launcher.Job) -> int:
        raise aiodist.LaunchError("no guard")

    monkeypatch.setattr("aiodist.launch.job.run", refused)
    assert run("await", "parked") == dict.fromkeys(["await", "parked"], "FAILED: no guard")


def test_s2_bench_gpu_the_whole_command(
    device: SimulatedCuda,
    outside: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = Jobs(monkeypatch)
    file = tmp_path / "out.json"
    assert command.main(["gpu", "--quick", "--json", str(file)]) == 0
    names = [name for name in CASES if name != "allreduce_devices"]  # there is one device
    assert jobs.names == names
    assert all(Study.from_json(job.command[-1]).own == {"quick": True} for job in jobs.seen)
    assert list(dict.fromkeys(record["op"] for record in json.loads(file.read_text()))) == names
    assert "0.05 CPU s/s" in capsys.readouterr().out
    jobs.codes["parked"] = 1
    assert command.main(["gpu", "--only", "parked"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only", "walk"], "--only walk: expected some of await"),
        (["--only", "allreduce_devices"], "this case needs several CUDA devices, and there is one here"),
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


def judged(name: str, value: float) -> bool:
    figure = next(iter(CASES[name].figures.values()))
    return replace(figure, value=value).reached


def test_s2_bench_gpu_judges() -> None:
    assert [judged("train_4", value) for value in (1.5, 1.49, float("nan"))] == [True, False, False]
    assert [judged("train", value) for value in (1.03, 1.04, float("nan"))] == [True, False, False]

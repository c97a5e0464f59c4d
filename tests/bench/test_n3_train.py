"""`bench train` and `prefetch`: options, records, and targets."""

import asyncio
import importlib
import json
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import aiodist
from aiodist.bench import peers
from aiodist.bench.records import dumps
from aiodist.bench.session import Session
from aiodist.errors import ConfigError
from aiodist.testing import run_ranks
from benchmarks import __main__ as command
from benchmarks import coding, engine_steps, models, prefetching, reading, threads, training
from benchmarks.figures import Figure, figures
from benchmarks.suite import BENCHMARKS, MODELS, Study, batches
from benchmarks.targets import verdicts
from tests.bench.written import loads
from tests.support.commands import python

TRAIN = Study("train", 2, ("datapar", "pipelined", "sync"), ("none",), repeat=1, own={"model": "tiny1000"})


async def measure(plan: Study) -> list[Figure]:
    gloo = [name for name in plan.peers if name == "gloo"]
    async with aiodist.init() as coll, peers.opened(gloo, coll) as opened:
        session = Session(plan, coll, plan.impls, opened, coll.barrier)
        return figures(await importlib.import_module(BENCHMARKS[plan.op].module).measure(session))


# --- what is asked ------------------------------------------------------------------------------------------------


def test_n3_batches() -> None:
    assert batches(replace(TRAIN, own={"batch": "32, 256"}), "mlp") == (32, 256)
    for wrong in ("", "0", "32,", "-1", "1.5", "many"):
        with pytest.raises(ConfigError, match=r"--batch .*expected"):
            batches(replace(TRAIN, own={"batch": wrong}), "mlp")


def test_n3_plan_travels() -> None:
    plan = Study("train", 2, ("sync",), ("none", "ddp"), own={"model": "mlp,conv", "batch": "4,32"})
    assert Study.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nosuch"], "python -m benchmarks: nosuch: expected one of allreduce, "),
        (["train", "--model", "gpt"], "--model gpt: expected some of mlp"),
        (["ps", "--model", "mlp"], "--model: ps has no model"),
        (["train", "--batch", "0"], "--batch '0': expected how many samples"),
        (["prefetch", "--batch", "4"], "--batch: prefetch has none"),
        (["train", "--impl", "mpi"], "--impl mpi: expected some of datapar, pipelined, sharded, sync"),
        (["ps", "--impl", "datapar"], "--impl datapar: expected some of ps, ps-arena"),
        (["train", "--against", "gloo"], "--against gloo: expected some of none, ddp"),
        (["train", "--sizes", "64"], "--sizes: train has no sizes"),
        (["train", "--dtype", "float64"], "--dtype: train is measured with float32"),
        (["prefetch", "--plot", "out.png"], "--plot: prefetch has no sizes"),
    ],
)
def test_n3_bad_arguments_are_one_clear_error(
    outside: None, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert command.main(arguments) == 2
    assert expected in capsys.readouterr().err


# --- what is trained ----------------------------------------------------------------------------------------------


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("name", "numel", "tensors"), [
    ("mlp", 16_785_408, 8), ("conv", 1_086_610, 43), ("transformer", 6_318_080, 96), ("tiny1000", 64_000, 1000),
])  # fmt: skip
def test_n3_models_are_made_from_seeds(name: str, numel: int, tensors: int) -> None:
    assert name in MODELS
    before = torch.get_rng_state()
    model, again = models.build(name), models.build(name)
    assert torch.equal(torch.get_rng_state(), before)
    parameters = list(model.parameters())
    assert (sum(p.numel() for p in parameters), len(parameters)) == (numel, tensors)
    assert all(torch.equal(a, b) for a, b in zip(parameters, again.parameters(), strict=True))
    assert not list(model.buffers())  # DDP would broadcast them
    (x, y), (other, _) = models.batch(name, model, 2, 0), models.batch(name, model, 2, 1)
    assert model(x).shape == y.shape
    assert not torch.equal(x, other)


def test_n3_gradients_of_tiny_parameters_come_one_by_one() -> None:
    model = models.Tiny(20)
    came: list[int] = []
    for index, parameter in enumerate(model.factors):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: came.append(index))
    model(torch.ones(1, 64)).sum().backward()
    assert came == list(range(19, -1, -1))


# --- what is measured ---------------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 20 parameters in place of that of 1,000."""
    monkeypatch.setitem(models.BUILDERS, "tiny1000", partial(models.Tiny, 20))


@pytest.mark.thorough
def test_n3_training_is_measured(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WARMUPS", 1)
    monkeypatch.setattr(training, "LAG_SECONDS", 0.01)
    before = torch.get_num_threads()
    found, others = run_ranks(2, partial(measure, TRAIN))
    assert others == []
    assert torch.get_num_threads() == before
    impls = ["aiodist:datapar", "aiodist:pipelined", "aiodist:sync", "none"]
    steps = [record for record in found if record.thread is None]
    assert [(r.op, r.impl, r.ranks, r.batch, r.nbytes) for r in steps] == [
        ("train:tiny1000", impl, 2, 1, 5120) for impl in impls
    ]
    for record in steps:
        assert record.seconds is not None
        assert 0 < record.seconds <= (record.p99 or 0)
        assert (record.loop_lag is not None) == (record.impl != "none")
        assert (record.overlap is not None) == (record.impl in ("aiodist:datapar", "aiodist:pipelined"))
    for impl in impls:
        cpu = {r.thread: r.cpu for r in found if (r.op, r.impl) == ("train:tiny1000:cpu", impl)}
        assert {threads.OTHERS, "MainThread" if impl == "none" else "aiodist-compute"} <= set(cpu)
        assert all(seconds is not None and seconds >= 0 for seconds in cpu.values())


def test_n3_cpu_seconds_are_those_of_each_thread() -> None:
    began, ended = threading.Event(), threading.Event()
    used: list[float] = []

    def works() -> None:
        while time.thread_time() < 0.05:
            pass
        used.append(time.thread_time())
        began.set()
        ended.wait(30)

    before = threads.cpu_seconds()
    thread = threading.Thread(target=works, name="works 1")
    thread.start()
    assert began.wait(30)
    spent = threads.since(before)
    ended.set()
    thread.join()
    assert spent["works"] == pytest.approx(used[0], abs=0.02)  # what it did since is not much
    assert "works" not in before


@pytest.mark.thorough
def test_n3_bench_train_beside_ddp(outside: None, tmp_path: Path) -> None:
    options = ["--model", "tiny1000", "--impl", "datapar", "--batch", "2", "--repeat", "1", "--json", "out.json"]
    done = python("-m", "benchmarks", "train", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())
    steps = [r for r in records if "thread" not in r]
    assert [(r["op"], r["impl"], r["batch"]) for r in steps] == [
        ("train:tiny1000", impl, 2) for impl in ("aiodist:datapar", "none", "ddp")
    ]
    assert all(r["seconds"] > 0 for r in steps)
    assert {"overlap", "loop_lag"} <= set(records[0])
    assert "tiny1000 2 aiodist:datapar / none" in done.stdout
    assert "CPU of each thread" in done.stdout


async def trained(names: tuple[str, ...]) -> list[torch.Tensor]:
    """Return the weights that each of these contenders has after three steps."""
    async with aiodist.init() as coll, AsyncExitStack() as stack:
        setting = training.Setting.make("tiny1000", 2, coll)
        trainers = [await stack.enter_async_context(training.TRAINERS[name](setting)) for name in names]
        weights = []
        for one in trainers:
            assert one.net is not None
            for _ in range(3):
                await one.step()
            await one.drain()
            weights.append(torch.cat([p.detach().clone() for p in one.net.parameters()]))
        return weights


def test_n3_contenders_train_alike(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "RATE", 0.1)
    begun = torch.cat([p.detach() for p in models.build("tiny1000").parameters()])
    by_rank = run_ranks(2, partial(trained, ("datapar", "pipelined", "sharded", "sync")))
    for weights in by_rank:
        for one in weights:
            torch.testing.assert_close(one, by_rank[0][0])
            assert not torch.allclose(one, begun, atol=1e-6)


@pytest.mark.thorough
def test_n3_prefetch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "SECONDS", 2e-4)
    monkeypatch.setattr(prefetching, "BATCHES", 3)
    plan = Study("prefetch", 1, ("prefetch",), ("plain", "dataloader"), repeat=1)
    (found,) = [asyncio.run(measure(plan))]
    impls = ["aiodist:prefetch", "plain", "loader", "step", "torch:dataloader", "torch:dataloader:2"]
    assert [(r.op, r.impl) for r in found] == [(op, impl) for op in ("prefetch", "prefetch:cpu") for impl in impls]
    assert all(record.seconds for record in found)


@pytest.mark.parametrize("ranks", [1, 2])
def test_n14_the_engine_is_measured_beside_the_bare_loop(
    few: None, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setattr(engine_steps, "EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(engine_steps, "EPOCH_STEPS", 2)
    plan = Study("engine", ranks, ("engine",), ("bare",), repeat=2, own={"model": "tiny1000"})
    found, *others = run_ranks(ranks, partial(measure, plan))
    assert [(r.op, r.impl, r.batch) for r in found] == [
        ("engine:tiny1000", impl, 1) for impl in ("aiodist:engine", "bare")
    ]
    assert all(record.seconds for record in found)
    assert others == [[]] * (ranks - 1)


@pytest.mark.thorough
def test_n12_coding_is_measured_and_so_are_steps_that_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "NUMEL", 1000)
    impls = ("int8", "sign", "topk")
    (found,) = [asyncio.run(measure(Study("codecs", 1, impls, ("int8-hook",), repeat=1)))]
    assert [(r.op, r.impl, r.nbytes) for r in found] == [
        ("codecs", impl, 4000) for impl in (*(f"aiodist:{name}" for name in impls), "int8-hook")
    ]
    first, second = run_ranks(2, partial(trained, ("powersgd", "topk", "bf16")))
    for mine, theirs in zip(first, second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_n16_reading_is_measured_and_held_against_plain_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "NBYTES", 3 << 20)
    found = asyncio.run(measure(Study("reading", 1, ("records", "queue"), ("plain",), repeat=1)))
    assert [(r.op, r.impl) for r in found] == [
        ("reading", impl) for impl in ("aiodist:records", "aiodist:queue", "plain")
    ]
    assert all(record.seconds and (record.nbytes or 0) > 3 << 20 for record in found)
    seconds = {"aiodist:records": 0.5, "aiodist:queue": 1.0, "plain": 0.4}
    judged = verdicts([Figure("reading", impl, 1, 1 << 28, seconds=took) for impl, took in seconds.items()])
    assert [(round(v.value, 3), v.reached) for v in judged] == [(0.8, True), (0.4, False)]


def test_n12_coding_is_held_against_the_hook_and_steps_against_plain_ones() -> None:
    coded = [("aiodist:int8", 0.02), ("aiodist:sign", 0.1), ("aiodist:topk", 0.1), ("int8-hook", 0.04)]
    steps = [("aiodist:datapar", 1.0), ("aiodist:powersgd", 0.19), ("aiodist:topk", 0.5)]
    found = verdicts(
        [Figure("codecs", impl, 1, 64_000_000, seconds=seconds) for impl, seconds in coded]
        + [Figure("train:mlp", impl, 2, batch=32, seconds=seconds) for impl, seconds in steps]
    )
    assert [(round(v.value, 3), v.reached) for v in found] == [
        (3.2, True),
        (0.64, False),
        (0.5, True),
        (0.19, True),
        (0.5, False),
    ]


def test_n17_a_checkpoint_beside_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WIDTH", 40)
    monkeypatch.setitem(models.INPUTS, "mlp", (40,))
    (found,) = [asyncio.run(measure(Study("checkpoint", 1, ("save",), ("gloo",), repeat=1)))]
    names = ("copy", "call", "write", "step", "step-beside")
    assert [(r.op, r.impl) for r in found] == [
        *(("checkpoint", f"aiodist:{name}") for name in names),
        ("checkpoint", "async_save:call"),
        ("checkpoint:beside", "aiodist:step"),
        ("checkpoint:lag", "aiodist:loop"),
    ]
    assert all(record.seconds or record.value is not None for record in found)
    assert [v.target for v in verdicts(found)] == [30.0, 30.0, 1.1]


def test_n17_checkpoints_are_held_against_what_they_may_take() -> None:
    records = [
        Figure("checkpoint", "aiodist:copy", 2, seconds=0.04),
        Figure("checkpoint", "aiodist:call", 2, seconds=0.001),
        Figure("checkpoint:beside", "aiodist:step", 2, value=1.07),
    ]
    assert [(round(v.value, 2), v.reached) for v in verdicts(records)] == [(1.0, True), (40.0, False), (1.07, True)]


# --- what the figures are held against ------------------------------------------------------------------------------


def test_n3_json_has_batch_overlap_and_lag_where_there_are() -> None:
    records = [
        Figure("train:mlp", "aiodist:datapar", 2, seconds=0.1, batch=32, overlap=0.9, loop_lag=0.002),
        Figure("train:mlp", "none", 2, seconds=0.1, batch=32),
    ]
    ours, none = json.loads(dumps(records))
    assert (ours["batch"], ours["overlap"], ours["loop_lag"]) == (32, 0.9, 0.002)
    assert none["batch"] == 32
    assert not {"overlap", "loop_lag", "value"} & set(none)
    assert loads(dumps(records)) == records


def step(model: str, batch: int, impl: str, milliseconds: float, lag: float | None = None) -> Figure:
    return Figure(f"train:{model}", impl, 2, seconds=milliseconds / 1e3, batch=batch, loop_lag=lag)


def test_n14_the_engine_is_held_against_the_bare_loop_of_its_model_and_batch() -> None:
    records = [
        Figure(f"engine:{model}", impl, 2, seconds=seconds, batch=batch)
        for model, batch, impl, seconds in (
            ("mlp", 32, "aiodist:engine", 0.104),
            ("mlp", 32, "bare", 0.1),
            ("mlp", 256, "aiodist:engine", 0.402),
            ("mlp", 256, "bare", 0.4),
            ("conv", 32, "aiodist:engine", 0.1),
        )
    ]
    found = {verdict.what: (round(verdict.value, 3), verdict.target, verdict.reached) for verdict in verdicts(records)}
    assert found == {
        "engine:mlp 32 / bare loop": (1.04, 1.03, False),
        "engine:mlp 256 / bare loop": (1.005, 1.03, True),
    }


def test_n3_steps_are_held_against_those_of_the_same_run() -> None:
    records = [
        step("mlp", 32, "aiodist:datapar", 72, 0.006),
        step("mlp", 32, "aiodist:pipelined", 70),
        step("mlp", 32, "none", 60),
        step("mlp", 32, "ddp", 90),
        step("conv", 32, "aiodist:datapar", 66),
        step("conv", 32, "none", 60),
        step("tiny1000", 1, "aiodist:datapar", 14),
        step("tiny1000", 1, "none", 12),
        Figure("train:conv:cpu", "aiodist:datapar", 2, batch=32, thread=threads.OTHERS, cpu=0.003),
        Figure("train:conv:cpu", "aiodist:datapar", 2, batch=32, thread="aiodist-progress", cpu=0.003),
        Figure("train:conv:cpu", "none", 2, batch=32, thread=threads.OTHERS, cpu=0.0005),
        Figure("train:conv:cpu", "ddp", 2, batch=32, thread=threads.OTHERS, cpu=0.005),
    ]
    found = {verdict.what: (round(verdict.value, 3), verdict.target, verdict.reached) for verdict in verdicts(records)}
    assert found == {
        "mlp 32 aiodist:datapar / none": (1.2, 1.05, False),
        "mlp 32 aiodist:datapar / ddp": (0.8, 1.0, True),
        "mlp 32 aiodist:pipelined / datapar": (0.972, 1.0, True),
        "conv 32 aiodist:datapar / none": (1.1, 1.04, False),
        "tiny1000 1 aiodist:datapar / none": (1.167, 1.15, False),
        "conv 32 aiodist:datapar - none, CPU of all threads but the computing": (2.5, 2.0, False),
        "mlp 32 aiodist:datapar, loop lag": (6.0, 5.0, False),
    }


def test_n3_epochs_are_held_against_the_slower_of_loader_and_step() -> None:
    def epochs(op: str, ranks: int) -> list[Figure]:
        figures = {"aiodist:prefetch": 0.21, "plain": 0.39, "loader": 0.2, "step": 0.19}
        return [Figure(op, impl, ranks, seconds=seconds, affinity=(0, 1)) for impl, seconds in figures.items()]

    (verdict,) = verdicts(epochs("prefetch", 2))
    assert (round(verdict.value, 3), verdict.target, verdict.reached) == (1.05, 1.1, True)
    assert verdicts(epochs("prefetch:cpu", 2)) == []  # two cores cannot do the work of four
    assert len(verdicts(epochs("prefetch:cpu", 1))) == 1

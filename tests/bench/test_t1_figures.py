"""What is computed from samples and sizes: no process, no clock."""

import json
import math

import pytest

from aiodist.bench.plan import Plan, default_sizes, parse_names, parse_sizes
from aiodist.bench.records import Record, bandwidths, dumps
from aiodist.bench.targets import verdicts
from aiodist.bench.timing import (
    WARMUPS,
    Contender,
    Pace,
    figures,
    interleaved,
    pace,
    percentile,
    slowest,
)
from aiodist.errors import ConfigError
from benchmarks.gpu_turns import slowest_of_each
from tests.support.records import loads

FIELDS = ["op", "impl", "ranks", "nbytes", "seconds", "mean", "p50", "p99", "algbw_gbps", "busbw_gbps"]
FIELDS += ["affinity", "torch_threads"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64", (64,)), ("1024,64MiB", (1024, 64 << 20)), ("4, 1 KiB ,2kb,1g", (4, 1024, 2000, 10**9)), ("0.5KiB", (512,))],
)
def test_t1_sizes(text: str, expected: tuple[int, ...]) -> None:
    assert parse_sizes(text, 4) == expected


@pytest.mark.parametrize("text", ["", "x", "64,", "1TiB", "-4", "0", "6", "2", "1.1", "1e3", "64 64"])
def test_t1_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--sizes .*expected"):
        parse_sizes(text, 4)


def test_t1_default_sizes_are_powers_of_two_and_an_odd_kick() -> None:
    elements = [nbytes // 4 for nbytes in default_sizes(4)]
    kicks = {count - (1 << power) for count, power in zip(elements, range(8, 24), strict=True)}
    assert len(kicks) == 1
    assert kicks.pop() % 2 == 1


def test_t1_names() -> None:
    assert parse_names("--impl", "auto, mpi,auto", ("auto", "mpi")) == ("auto", "mpi")
    for wrong in ("mpy", "", "auto,"):
        with pytest.raises(ConfigError, match=r"--impl .*expected some of auto, mpi"):
            parse_names("--impl", wrong, ("auto", "mpi"))


def test_t1_plan_travels() -> None:
    plan = Plan("allreduce", 2, ("auto", "mpi"), ("gloo",), sizes=(4, 8), json="out.json")
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(Plan("await", 2, ("auto",), ()).to_json()).sizes is None


@pytest.mark.parametrize(
    ("op", "algorithm", "bus"),
    [
        ("allreduce", 1.0, 1.5),
        ("broadcast", 1.0, 1.0),
        ("reduce", 1.0, 1.0),
        ("scan", 1.0, 1.0),
        ("sendrecv", 1.0, 1.0),
        ("reduce_scatter", 1.0, 0.75),
        ("alltoall", 1.0, 0.75),
        ("scatter", 1.0, 0.75),
        ("allgather", 4.0, 3.0),
        ("gather", 4.0, 3.0),
    ],
)
def test_t1_bandwidths_as_nccl_tests_has_them(op: str, algorithm: float, bus: float) -> None:
    assert bandwidths(op, 10**9, 1.0, 4) == (algorithm, bus)


def test_t1_no_bandwidth_without_bytes() -> None:
    assert bandwidths("barrier", 0, 1e-6, 2) == (None, None)
    assert bandwidths("allreduce", 4, 0.0, 2) == (None, None)


def test_t1_figures_are_of_the_slowest_rank() -> None:
    quick_but_for_once, steady = [1.0, 1.0, 1.0, 1.0, 100.0], [2.0, 3.0, 2.0, 2.0, 2.0]
    rank, found = slowest([quick_but_for_once, steady])
    assert rank == 1
    assert (found.median, found.p99) == (2.0, 3.0)
    assert math.isclose(found.mean, 2.2)


def test_t1_where_ranks_take_turns_each_sample_is_that_of_its_slowest() -> None:
    assert slowest_of_each([[1.0, 9.0, 1.0], [9.0, 1.0, 2.0]]) == [9.0, 9.0, 2.0]


def test_t1_percentile_and_median() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile(range(200), 99) == 197
    assert figures([1.0, 2.0]).median == 1.5


def test_t1_small_operations_are_timed_in_batches() -> None:
    assert pace(4, None).batch == 100
    assert pace(64 << 20, None).batch == 1
    assert pace(64 << 20, 3) == Pace(3, 1)
    assert pace(64, 3).repeat == 3


async def test_t1_contenders_take_turns_after_warming_up() -> None:
    calls: list[str] = []

    async def fence() -> None:
        calls.append("|")

    async def awaited() -> None:
        calls.append("a")

    contenders = [Contender("ours", awaited, awaited=True), Contender("theirs", lambda: calls.append("b"))]
    samples = await interleaved(contenders, fence, Pace(repeat=3, batch=2))
    assert {name: len(found) for name, found in samples.items()} == {"ours": 3, "theirs": 3}
    turns = "".join(calls).split("|")[1:]
    assert len(turns) == 2 * (WARMUPS + 3)
    assert turns[:8] == ["bb", "aa", "aa", "bb", "bb", "aa", "aa", "bb"]


def test_t1_json_has_the_fields_and_null_for_what_is_absent() -> None:
    records = [
        Record("allreduce", "aiodist:auto", 2, 64, 1e-6, 1e-6, 1e-6, 2e-6, 0.1, 0.1, (0, 1), 2),
        Record("parked_cpu", "aiodist:auto", 2, value=0.03),
    ]
    timed, valued = json.loads(dumps(records))
    assert list(timed) == FIELDS
    assert list(valued) == [*FIELDS, "value"]
    assert valued["seconds"] is None
    assert valued["value"] == 0.03
    assert timed["affinity"] == [0, 1]
    assert loads(dumps(records)) == records


def test_t1_targets_compare_with_the_peer_of_the_same_run() -> None:
    def small(impl: str, seconds: float) -> Record:
        return Record("await_small", impl, 2, 4, seconds)

    def large(impl: str, rate: float) -> Record:
        return Record("allreduce", impl, 2, 64 << 20, 1.0, algbw_gbps=rate)

    records = [
        small("aiodist:auto", 3e-6),
        small("mpi4py:iallreduce", 2e-6),
        small("aiodist:gloo", 300e-6),
        small("gloo", 200e-6),
        Record("issue", "aiodist:auto", 2, 4, 12e-6),
        large("aiodist:auto", 5.0),
        large("mpi4py:allreduce", 2.0),
        large("mpi4py:iallreduce", 4.0),
        Record("loop_lag", "aiodist:auto", 2, value=0.002),
    ]
    found = {verdict.what: verdict for verdict in verdicts(records)}
    assert [(round(v.value, 3), v.reached) for v in found.values()] == [
        (1.5, True),
        (1.5, False),
        (12.0, False),
        (1.25, True),
        (2.0, True),
    ]
    assert list(found)[:2] == ["await aiodist:auto 4 B / mpi4py:iallreduce", "await aiodist:gloo 4 B / gloo"]


def test_t1_no_verdict_without_a_peer() -> None:
    assert verdicts([Record("await_small", "aiodist:auto", 2, 4, 3e-6)]) == []

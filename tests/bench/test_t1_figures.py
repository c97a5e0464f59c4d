"""What is computed from samples and sizes: no process, no clock."""

import json
import math
from functools import partial

import pytest

from aiodist import Communicator
from aiodist.bench import timing
from aiodist.bench.plan import Plan, default_sizes, parse_names, parse_sizes
from aiodist.bench.records import Record, bandwidths, dumps
from aiodist.bench.session import Session
from aiodist.bench.timing import (
    WARMUPS,
    Contender,
    Pace,
    interleaved,
    pace,
    percentile,
    slowest,
    slowest_of_each,
)
from aiodist.errors import ConfigError
from benchmarks.await_targets import verdicts
from benchmarks.busy import BUSY
from benchmarks.figures import Figure, figures
from tests.bench.written import loads

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


@pytest.mark.ranks(3)
async def test_t1_figures_are_of_the_slowest_rank(coll: Communicator) -> None:
    quick_but_for_once, steady = [1.0, 1.0, 1.0, 1.0, 100.0], [2.0, 3.0, 2.0, 2.0, 2.0]
    session = Session(Plan("op", 3, (), ()), coll, (), (), coll.barrier)
    found = await session.timed("op", 8, {"ours": [quick_but_for_once, steady, []][coll.rank]})
    assert slowest([quick_but_for_once, steady, []]) == 1
    if coll.rank:
        assert found == []
    else:
        (record,) = found
        assert (record.seconds, record.p50, record.p99) == (2.0, 2.0, 100.0)
        assert record.mean is not None
        assert math.isclose(record.mean, 21.8)


def test_t1_where_ranks_take_turns_each_sample_is_that_of_its_slowest() -> None:
    assert slowest_of_each([[1.0, 9.0, 1.0], [9.0, 1.0, 2.0]]) == [9.0, 9.0, 2.0]


def test_t1_percentile_and_median() -> None:
    assert percentile([5.0], 99) == 5.0
    assert percentile(range(200), 99) == 197


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


async def test_t1_overwriting_is_between_two_barriers_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = 0.0
    monkeypatch.setattr(timing, "perf_counter", lambda: clock)

    async def fence() -> None:
        calls.append("|")

    def takes(seconds: float, call: str) -> None:
        nonlocal clock
        clock += seconds
        calls.append(call)

    contender = Contender("ours", partial(takes, 1.0, "o"), overwrite=partial(takes, 5.0, "w"))
    samples = await interleaved([contender], fence, Pace(repeat=2, batch=2, warmups=0))
    assert "".join(calls) == 2 * ("|" + 2 * "|w|o")
    assert samples == {"ours": [1.0, 1.0]}


def test_t1_json_has_the_fields_and_null_for_what_is_absent() -> None:
    records = [
        Record("allreduce", "aiodist:auto", 2, 64, 1e-6, 1e-6, 1e-6, 2e-6, 0.1, 0.1, (0, 1), 2),
        Figure("parked_cpu", "aiodist:auto", 2, value=0.03),
    ]
    timed, valued = json.loads(dumps(records))
    assert list(timed) == FIELDS
    assert list(valued) == [*FIELDS, "value"]
    assert valued["seconds"] is None
    assert valued["value"] == 0.03
    assert timed["affinity"] == [0, 1]
    assert loads(dumps(records)) == figures(records)


def small(impl: str, seconds: float, op: str = "await_small", mean: float = 0.0) -> Record:
    return Record(op, impl, 2, 4, seconds, mean or seconds)


def test_t1_targets_compare_with_the_peer_of_the_same_run() -> None:
    records = [
        small("aiodist:auto", 3e-6),
        small("mpi4py:allreduce", 2e-6),
        small("mpi4py:iallreduce", 6e-6),
        small("aiodist:gloo", 300e-6),
        small("gloo", 200e-6),
        small("aiodist:auto", 12e-6, "issue_1000"),
        small("aiodist:auto", 2e-6, "gather_1000"),
        small("asyncio:finished", 2e-6, "gather_1000"),
        small("aiodist:auto", 24e-6, "issue_20000"),
        small("aiodist:auto", 90e-6, "wake_up"),
        small("pipe:add_reader", 60e-6, "wake_up"),
        small("pipe:read", 30e-6, "wake_up"),
        Figure("loop_lag", "aiodist:auto", 2, value=0.002),
    ]
    assert {verdict.what: (round(verdict.value, 3), verdict.reached) for verdict in verdicts(records)} == {
        "await aiodist:auto 4 B / mpi4py:allreduce": (1.5, False),
        "await aiodist:auto 4 B / mpi4py:iallreduce": (0.5, True),
        "await aiodist:gloo 4 B / gloo": (1.5, False),
        "gather_1000, each / asyncio:finished": (1.0, True),
        "issue_1000, each": (12.0, False),
        "issue, each of 20,000 / of 1,000": (2.0, False),
        "wake_up aiodist:auto / pipe:add_reader": (1.5, False),
        "loop_lag": (2.0, True),
    }


def test_t1_beside_busy_cores_the_mean_counts_too() -> None:
    op = "await_small" + BUSY
    records = [small("aiodist:auto", 3e-6, op, mean=8e-6), small("mpi4py:iallreduce", 6e-6, op, mean=10e-6)]
    assert [(verdict.what[-6:], verdict.reached) for verdict in verdicts(records)] == [
        ("median", True),
        (", mean", False),
    ]


def test_t1_collectives_are_held_against_blocking_mpi() -> None:
    def sized(op: str, impl: str, nbytes: int, milliseconds: float, ranks: int = 2) -> Record:
        return Record(op, impl, ranks, nbytes, milliseconds / 1e3)

    records = [
        sized("allreduce", "aiodist:auto", 4 << 20, 10),
        sized("allreduce", "aiodist:arena", 4 << 20, 5),
        sized("allreduce", "mpi4py:allreduce", 4 << 20, 14),
        sized("allreduce", "mpi4py:iallreduce", 4 << 20, 1),
        sized("allreduce", "aiodist:arena", 64 << 20, 5),
        sized("allreduce", "copy", 64 << 20, 3),
        sized("allgather", "aiodist:arena", 64 << 20, 10),
        sized("allgather", "mpi4py:allgather", 64 << 20, 16),
        sized("allreduce", "aiodist:arena", 64 << 10, 5, ranks=4),
        sized("allreduce", "mpi4py:allreduce", 64 << 10, 11, ranks=4),
        sized("allreduce", "aiodist:auto", 4, 10),
    ]
    assert {verdict.what: (round(verdict.value, 3), verdict.reached) for verdict in verdicts(records)} == {
        "allreduce 4 MiB aiodist:auto against mpi4py:allreduce, 2 ranks": (1.4, False),
        "allreduce 4 MiB aiodist:arena against mpi4py:allreduce, 2 ranks": (2.8, False),
        "allreduce 64 KiB aiodist:arena against mpi4py:allreduce, 4 ranks": (2.2, True),
        "allreduce 64 MiB aiodist:arena / copy": (1.667, True),
        "allgather 64 MiB aiodist:arena against mpi4py:allgather, 2 ranks": (1.6, True),
    }


def test_t1_no_verdict_without_a_peer() -> None:
    assert verdicts([Record("await_small", "aiodist:auto", 2, 4, 3e-6)]) == []

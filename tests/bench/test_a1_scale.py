"""`benchmarks scale`: the simulator against closed forms and stated costs, the shortcuts against every rank."""

import json
import math
from itertools import product
from pathlib import Path

import pytest

from aiodist.errors import ConfigError
from aiodist.schedules import SCHEDULES, Blocks, Copy, Recv, Schedule, Send, Step
from benchmarks import __main__ as command
from benchmarks.loggp import LogGP, Machine, Phase, simulate
from benchmarks.scale import COMBINE, PRESETS
from benchmarks.scale_model import (
    ALIKE,
    HIERARCHICAL,
    OPS,
    Case,
    Layout,
    estimate,
    estimate_stages,
    flat,
    follow,
    forms,
    hierarchical,
    names,
)
from benchmarks.schedule_costs import cost_of

ETHERNET, HOST = PRESETS["ethernet25"], PRESETS["host"]
BLOCKED = ("allgather", "reduce_scatter")
ROOTED = ("broadcast", "reduce")


def one_each(network: LogGP, combine: float = COMBINE) -> Machine:
    return Machine(network, HOST, combine)


def planned(op: str, name: str, rank: int, size: int, n: int, **chunks: int) -> Schedule:
    found = SCHEDULES[op][name]
    if op == "alltoall":
        return found.plan(rank, size, Blocks.even(n, size), Blocks([Blocks.even(n, size).count(rank)] * size))
    if op in BLOCKED:
        return found.plan(rank, size, Blocks.even(n, size), **chunks)
    return found.plan(rank, size, n, *((0,) if op in ROOTED else ()), **chunks)


def everybody(op: str, name: str, size: int, n: int, **chunks: int) -> list[tuple[Phase, ...]]:
    return [(Phase(planned(op, name, rank, size, n, **chunks), range(size)),) for rank in range(size)]


def steps(*given: Step) -> tuple[Phase, ...]:
    return (Phase(Schedule(100, (lambda: iter(given),)), range(4)),)


# --- the simulator ---------------------------------------------------------------------------------------------------


def closed_form(op: str, name: str, p: int, nbytes: int, net: LogGP, gamma: float) -> float:
    """Return the seconds of a schedule among 2^k ranks, `nbytes` of buffer that p divides; see the papers there."""
    k = p.bit_length() - 1
    block = nbytes // p
    match op, name:
        case "allreduce", "ring":
            return 2 * (p - 1) * net.message(block) + (p - 1) * block * gamma
        case "reduce_scatter", "ring":
            return (p - 1) * (net.message(block) + block * gamma)
        case "allgather", "ring":
            return (p - 1) * net.message(block)
        case "allreduce", "halving":
            halves = sum(net.message(nbytes >> i) for i in range(1, k + 1))
            return 2 * halves + (nbytes - block) * gamma
        case "allgather", "doubling":
            return sum(net.message(nbytes >> i) for i in range(1, k + 1))
        case "broadcast", "tree":
            return k * net.message(nbytes)
        case "allreduce", "doubling":  # and one copy of a result in scratch memory
            return k * (net.message(nbytes) + nbytes * gamma) + nbytes * gamma
        case _:  # broadcast, chain
            return (p - 1) * net.message(nbytes)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *product(("allreduce", "reduce_scatter", "allgather"), ("ring",)),
        *[("allreduce", "halving"), ("allreduce", "doubling"), ("allgather", "doubling")],
        *product(("broadcast",), ("tree", "chain")),
    ],
)
@pytest.mark.parametrize("network", PRESETS)
def test_a1_simulated_time_is_the_closed_form(op: str, name: str, network: str) -> None:
    for p, nbytes in product((2, 4, 8, 16), (64, 1 << 20)):
        run = simulate(everybody(op, name, p, nbytes // 4), one_each(PRESETS[network]))
        assert run.seconds == pytest.approx(closed_form(op, name, p, nbytes, PRESETS[network], COMBINE))


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in SCHEDULES for name in SCHEDULES[op]])
def test_a1_simulated_messages_and_bytes_are_the_stated_costs(op: str, name: str) -> None:
    found = SCHEDULES[op][name]
    for p, n, chunks in product((2, 3, 5, 8, 13), (0, 1, 4, 39, 104), (1, 3)):
        if (chunks > 1 and not found.chunked) or (found.equal and n % p):
            continue
        if op == "alltoall" and n % p:
            continue  # ranks that send alike need equal blocks
        keywords = {"chunks": chunks} if found.chunked else {}
        cost = cost_of(op, name)(p, Blocks.even(n, p) if op in (*BLOCKED, "alltoall") else n, **keywords)
        run = simulate(everybody(op, name, p, n, **keywords), one_each(ETHERNET), itemsize=4)
        assert (max(run.messages), max(run.nbytes)) == (cost.messages, 4 * cost.elements), (p, n, chunks)


def test_a1_a_message_takes_what_loggp_says() -> None:
    net = LogGP(latency=10.0, overhead=2.0, gap=3.0, byte_gap=0.5)
    to_1 = [Send(1, i, i + 2) for i in (0, 2)]
    from_0 = [Recv(0, i, i + 2) for i in (0, 2)]
    machine = one_each(net)
    # o + (k-1)G + L + o for a message of 8 bytes; the last byte of the first, then g, before the next one's first.
    assert simulate([steps((to_1[0],)), steps((from_0[0],))], machine).seconds == 2 + 3.5 + 10 + 2
    assert simulate([steps(tuple(to_1)), steps(tuple(from_0))], machine).seconds == 2 + 3.5 + 3 + 3.5 + 10 + 2
    # What is there already is taken when it is asked for, and combined by the same processor.
    late = steps((Copy(0, 50, 50),), (Recv(0, 0, 2, combine=True),))
    slow = Machine(net, net, combine=0.25)
    assert simulate([steps((to_1[0],)), late], slow).seconds == 50 + 2 + 2


def test_a1_ranks_of_a_host_share_its_ports() -> None:
    net = LogGP(latency=10.0, overhead=1.0, gap=1.0, byte_gap=0.25)

    def ends(ports: int) -> float:
        crossing = [steps((Send(rank + 2, 0, 10),)) for rank in (0, 1)]
        crossing += [steps((Recv(rank, 0, 10),)) for rank in (0, 1)]
        return simulate(crossing, Machine(net, HOST, local=2, ports=ports)).seconds

    alone = net.message(40)
    assert ends(2) == alone
    assert ends(1) == alone + net.stretch(40) + net.gap


def test_a1_programs_that_do_not_fit_together_are_errors() -> None:
    with pytest.raises(ValueError, match="rank 1 gets no message from rank 0"):
        simulate([steps(), steps((Recv(0, 0, 2),))], one_each(HOST))
    with pytest.raises(ValueError, match="rank 1 never receives from rank 0"):
        simulate([steps((Send(1, 0, 2),)), steps()], one_each(HOST))
    with pytest.raises(ValueError, match="12 bytes were sent"):
        simulate([steps((Send(1, 0, 3),)), steps((Recv(0, 0, 2),))], one_each(HOST))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((-1.0, 0, 0, 0), "latency -1.0: expected seconds"),
        ((0, math.inf, 0, 0), "overhead inf: expected seconds"),
        ((0, 0, math.nan, 0), "gap nan: expected seconds"),
        ((0, 0, 1e-9, 1e-6), "shorter than the gap per byte"),
    ],
)
def test_a1_a_network_that_cannot_be_is_refused(values: tuple[float, ...], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        LogGP(*values)
    with pytest.raises(ConfigError, match="3 ports: expected 1 to 2"):
        Machine(HOST, HOST, local=2, ports=3)


# --- shortcuts -------------------------------------------------------------------------------------------------------


MACHINES = [
    Machine(PRESETS[network], HOST, COMBINE, local, ports)
    for network, (local, ports) in product(PRESETS, ((1, 1), (4, 1), (4, 4)))
]


@pytest.mark.parametrize("local", [1, 4])
@pytest.mark.parametrize(("op", "name"), sorted((op, name) for op, name in ALIKE if name in SCHEDULES[op]))
def test_a1_one_host_stands_for_all_where_they_are_alike(op: str, name: str, local: int) -> None:
    for p, n in ((8, 64), (16, 160), (32, 1 << 16)):
        for machine in (m for m in MACHINES if m.local == local):
            programs = everybody(op, name, p, n)
            run = simulate(programs, machine)
            # Rank 0 copies more than others in one of them, and less in another.
            alike = [simulate(programs[first : first + local], machine, ranks=p, first=first) for first in (0, local)]
            assert max(one.seconds for one in alike) == pytest.approx(run.seconds), machine
            assert name == "direct" or alike[1].seconds == pytest.approx(run.seconds), machine


@pytest.mark.parametrize("ring", [True, False])
def test_a1_alike_within_an_element_where_ranks_do_not_divide(ring: bool) -> None:
    """A buffer in equal parts for one in whole elements, fewer of them than ranks among others."""
    name = "ring" if ring else "halving"
    for p, n in ((16, 3), (16, 100), (32, 1000), (64, 7)):
        case = Case("allreduce", p, 4 * n, Machine(ETHERNET, HOST, COMBINE, local=4))
        run = simulate(everybody("allreduce", name, p, n), case.machine)
        assert estimate(case, name).seconds == pytest.approx(run.seconds, rel=0.02), (p, n)


@pytest.mark.parametrize(
    ("op", "name", "ranks"),
    [
        *[("allreduce", "ring", 256), ("allreduce", "tree", 512), ("allreduce", HIERARCHICAL, 256)],
        *[("broadcast", "chain", 256), ("broadcast", "tree", 512), ("reduce_scatter", "direct", 256)],
    ],
)
def test_a1_a_line_leads_where_every_message_does(op: str, name: str, ranks: int) -> None:
    followed = 0
    for case in (Case(op, ranks, 4 << 20, MACHINES[4]), Case(op, ranks, 1 << 10, MACHINES[8])):
        for stages in forms(op) if name == HIERARCHICAL else [flat(op, name)]:
            layout = Layout.of(case, stages)
            if (seconds := follow(layout)) is not None:
                followed += 1
                assert seconds == pytest.approx(layout.seconds(case.hosts), rel=1e-3), stages
    assert followed


def test_a1_hierarchical_sends_what_its_stages_state() -> None:
    for op in OPS:
        case = Case(op, 32, 4 << 10, Machine(ETHERNET, HOST, COMBINE, local=4))
        within, between = ("tree", "tree") if op == "broadcast" else ("ring", "ring")
        layout = Layout(case, hierarchical(op, within, between), alike=False)
        run = simulate([layout.program(rank, case.hosts, 32) for rank in range(32)], case.machine)
        stated = estimate_stages(case, layout.stages)
        assert (max(run.messages), max(run.nbytes)) == (stated.messages, stated.nbytes), op


def test_a1_too_many_messages_are_left_open() -> None:
    case = Case("allreduce", 3 << 16, 1 << 10, one_each(ETHERNET))
    assert estimate(case, "doubling").seconds is None
    assert estimate(case, "doubling").messages == 18


def test_a1_hierarchy_pays_between_hosts_and_rings_on_few_ranks() -> None:
    machine = Machine(ETHERNET, HOST, COMBINE, local=8)
    seconds = {
        (name, p, nbytes): estimate(Case("allreduce", p, nbytes, machine), name).seconds or math.inf
        for name, p, nbytes in product(("ring", "tree", "halving", HIERARCHICAL), (16, 65536), (1 << 10, 64 << 20))
    }
    for name in ("ring", "tree", "halving"):
        assert seconds[HIERARCHICAL, 65536, 64 << 20] < seconds[name, 65536, 64 << 20] / 4
    assert seconds["ring", 16, 64 << 20] < seconds["tree", 16, 64 << 20] < seconds["tree", 65536, 64 << 20]
    assert seconds["tree", 65536, 1 << 10] < seconds["ring", 65536, 1 << 10] / 100


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a1_command_prints_and_writes(
    outside: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--ranks", "2,16,65536", "--sizes", "1KiB,64MiB", "--network", "infiniband400", "--gap", "2e-7"]
    assert command.main(["scale", *options, "--json", "out.json"]) == 0
    entries = {(one["impl"], one["ranks"], one["nbytes"]): one for one in json.loads(Path("out.json").read_text())}
    # one host has no hierarchy
    shown = ("ring", "tree", "doubling", "halving", HIERARCHICAL)
    expected = set(product(shown, (2, 16, 65536), (1 << 10, 1 << 26)))
    assert set(entries) == expected - {(HIERARCHICAL, 2, 1 << 10), (HIERARCHICAL, 2, 1 << 26)}
    ring = entries["ring", 65536, 1 << 26]
    assert (ring["messages"], ring["hosts"], ring["stages"]) == (131070, 8192, ["flat allreduce ring"])
    said = capsys.readouterr().out
    for text in ("65536", "131070 / 128 MiB", "hierarchical", "64 MiB per rank"):
        assert text in said


@pytest.mark.parametrize("op", [op for op in OPS if op != "allreduce"])
def test_a1_command_takes_other_operations(outside: None, capsys: pytest.CaptureFixture[str], op: str) -> None:
    arguments = ["--op", op, "--ranks", "2,32", "--sizes", "1KiB", "--local", "4", "--ports", "2", "--chunks", "2"]
    assert command.main(["scale", *arguments]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in names(op) if name != "direct")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--op", "barrier"], "--op barrier: expected one of allreduce"),
        (["--ranks", "1"], "--ranks 1: expected 2 to"),
        (["--ranks", "2,x"], "--ranks x: expected 2 to"),
        (["--ranks", "12"], "--ranks 12: expected a multiple of --local 8"),
        (["--sizes", "6"], "--sizes 6: expected a multiple of 4"),
        (["--impl", "magic"], "--impl magic: expected some of ring"),
        (["--network", "token-ring"], "--network token-ring: expected one of host, ethernet25, infiniband400"),
        (["--inside", "1,2,3"], "--inside 1,2,3: expected one of host"),
        (["--latency", "-1"], "latency -1.0: expected seconds"),
        (["--byte-gap", "1"], "shorter than the gap per byte"),
        (["--ports", "9"], "9 ports: expected 1 to 8"),
        (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json: expected a file"),
        (["--wrong"], "--wrong"),
    ],
)
def test_a1_bad_arguments_are_one_clear_error(
    outside: None, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert command.main(["scale", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert expected in said.err

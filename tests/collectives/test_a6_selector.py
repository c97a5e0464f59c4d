"""A6: the selector's table, printed and edited; every rank has the same, and everything chooses through it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import aiodist
from aiodist import BackendUnavailable, Communicator, ConfigError, Handle, MismatchError, nn
from aiodist.collectives.choice.availability import OfferState
from aiodist.collectives.choice.selector import Selector
from aiodist.collectives.choice.table import HOSTS, LIMITS, NAMES, Table, parse_edit
from aiodist.collectives.choice.tablefile import read_edits, render, write
from aiodist.communicator import parts_of
from aiodist.testing import run_ranks
from aiodist.testing.seams.algorithms import NativeCollectives, Repertoire, Scheduled
from aiodist.testing.seams.carriers import LocalHub, LocalTransport
from aiodist.testing.seams.transport import Wanted
from aiodist.types import OPERATIONS


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The allreduces that messages carry, by name, each rank's."""
    names: list[str] = []
    run = Scheduled.run

    def noted(self, ep, primitives):  # type: ignore[no-untyped-def]
        names.extend(self.name for o in primitives if o.kind == "allreduce")
        return run(self, ep, primitives)

    monkeypatch.setattr(Scheduled, "run", noted)
    return names


# --- the table alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["mpi", "gloo", None])
def test_a6_usual_tables_choose_for_every_size(library: str | None) -> None:
    table = Table.usual(library)
    for hosts in HOSTS:
        for operation in OPERATIONS:
            for nbytes in (0, 1, 1 << 16, (1 << 18) - 1, 1 << 18, 1 << 40):
                assert table.choice("cpu", hosts, operation, nbytes) in NAMES[operation]


def test_a6_an_edit_is_about_its_range_and_nothing_else() -> None:
    before = Table.usual("mpi")
    after = before.edited(parse_edit("cpu one allreduce 1000 2000 ring"))
    for nbytes in (0, 999, 1000, 1999, 2000, 1 << 30):
        expected = "ring" if 1000 <= nbytes < 2000 else before.choice("cpu", "one", "allreduce", nbytes)
        assert after.choice("cpu", "one", "allreduce", nbytes) == expected
    for hosts, operation in (("several", "allreduce"), ("one", "broadcast")):
        assert after.ranges(hosts=hosts, operation=operation) == before.ranges(hosts=hosts, operation=operation)
    assert before.choice("cpu", "one", "allreduce", 1000) == "shm"
    over = after.edited(parse_edit("cpu one allreduce 0 - tree"))
    assert [str(edit) for edit in over.ranges(hosts="one", operation="allreduce")] == ["cpu one allreduce 0 - tree"]


def test_a6_what_is_printed_makes_the_same_table() -> None:
    table = Table.usual("mpi").edited(parse_edit("cpu several scan 1000 3MiB chain"))
    again = Table.usual("gloo")
    for edit in table.ranges():
        again = again.edited(parse_edit(str(edit)))
    assert again.rows == table.rows


def test_a6_hosts_decide_and_what_is_missing_is_replaced() -> None:
    def choices(hosts: list[list[int]]) -> list[str]:
        four = Repertoire(LocalTransport(LocalHub(), 0, 4), Table.usual("mpi"), hosts=hosts)
        return [four.choice("allreduce", 1 << 20), four.choice("scan", 1 << 20)]

    assert choices([[0, 1], [2, 3]]) == ["hierarchical", "chain"]
    assert choices([[0, 1, 2], [3]]) == ["leaders", "chain"]
    assert choices([[0, 1, 2, 3]]) == ["ring", "chain"]  # shm, and there is none


def test_a6_a_later_step_is_no_librarys() -> None:
    transport = LocalTransport(LocalHub(), 0, 2)
    two = Repertoire(transport, Table.usual("mpi").edited(parse_edit("cpu one allgather 0 - mpi")))
    two.all["mpi"] = NativeCollectives("mpi", _Native())  # type: ignore[arg-type]
    wanted = Wanted("allgather", torch.uint8, None, 64)
    assert (two.pick(wanted).name, two.pick(wanted, later=True).name) == ("mpi", "doubling")


class _Native:
    finishes, inline_bytes, in_order, recallable = False, 0, True, False

    def supports(self, wanted: Wanted) -> bool:
        return True


# --- looking at it, and edits --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
async def test_a6_show(coll: Communicator) -> None:
    text = str(coll.selector)
    assert all(word in text for word in (*OPERATIONS, *LIMITS))
    some = coll.selector.show(operation="allreduce", device="cpu", hosts="one").splitlines()
    assert [line.split() for line in some[1:]] == [["cpu", "one", "allreduce", "0", "-", "direct"]]
    assert coll.selector.show(device="cuda").splitlines()[1:] == []
    coll.selector.set("allreduce", "ring", above=1 << 20)
    some = coll.selector.show(operation="allreduce", hosts="one").splitlines()
    assert [line.split()[3:] for line in some[1:]] == [["0", "1MiB", "direct"], ["1MiB", "-", "ring"]]


@pytest.mark.ranks(2)
async def test_a6_an_edit_takes_effect_at_once_and_need_not_be_awaited(coll: Communicator, names: list[str]) -> None:
    t = torch.ones(10)
    assert (await coll.allreduce(t)).tolist() == [2.0] * 10
    coll.selector.set("allreduce", "ring", above=40, below=44)
    await coll.allreduce(t)
    await coll.allreduce(torch.ones(11))
    await coll.barrier()
    assert coll.selector.choose("allreduce", 43) == "ring"
    expected = ["direct"] * 2 + ["ring"] * 2 + ["direct"] * 2
    assert sorted(names) == sorted(expected)


@pytest.mark.ranks(2)
async def test_a6_what_was_issued_before_goes_on_as_it_was(coll: Communicator, names: list[str]) -> None:
    handle = coll.allreduce(torch.ones(1 << 17))  # compared first, so that nothing is sent before the edit
    await coll.selector.set("allreduce", "ring")
    await handle
    assert set(names) == {"direct"}


@pytest.mark.ranks(2)
async def test_a6_limits(coll: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dict(coll.selector.limits) == {name: limit.usual for name, limit in LIMITS.items()}
    sent = 0
    isend = LocalTransport.isend

    def counted(self, t, dst, tag, done):  # type: ignore[no-untyped-def]
        nonlocal sent
        sent += self is parts_of(coll).transport
        isend(self, t, dst, tag, done)

    monkeypatch.setattr(LocalTransport, "isend", counted)

    async def messages() -> int:
        nonlocal sent
        await coll.barrier()
        sent = 0
        await coll.allreduce(torch.ones(1000), impl="ring")
        return sent

    one = await messages()
    coll.selector.set_limit("chunk_bytes", 1000)
    assert await messages() - 1 == 4 * (one - 1)  # one compares
    coll.selector.set_limit("ring.chunks", 2)
    assert await messages() - 1 == 2 * (one - 1)
    coll.selector.set_limit("large_bytes", 1 << 30)
    assert (coll.selector.limits["large_bytes"], parts_of(coll).dispatcher.large_bytes) == (1 << 30, 1 << 30)
    parts_of(coll).dispatcher.large_bytes = 1 << 16
    assert coll.selector.limits["large_bytes"] == 1 << 16


@pytest.mark.ranks(2)
async def test_a6_wrong_edits_are_errors_that_name_the_known(coll: Communicator) -> None:
    before = str(coll.selector)
    wrong: list[tuple[Callable[[Selector], object], type[Exception], str]] = [
        (
            lambda s: s.set("allredcue", "ring"),
            ValueError,
            "operation 'allredcue': expected one of allreduce, broadcast",
        ),
        (lambda s: s.set("scan", "ring"), ValueError, "of scan 'ring': expected one of mpi, gloo, shm, doubling"),
        (lambda s: s.set("scan", "chain", above=-1), ValueError, "sizes -1: expected bytes"),
        (lambda s: s.set("scan", "chain", above=8, below=8), ValueError, "sizes 8 to 8: expected bytes"),
        (lambda s: s.set("scan", "chain", device="tpu"), ValueError, "device 'tpu': expected one of cpu, cuda"),
        (lambda s: s.set("scan", "chain", hosts="two"), ValueError, "hosts 'two': expected one of one, several"),
        (lambda s: s.set_limit("ring.chunk", 1), ValueError, "limit 'ring.chunk': expected one of ring.chunks"),
        (lambda s: s.set_limit("ring.chunks", 33), ValueError, "ring.chunks 33: expected 1 to 32"),
        (lambda s: s.show(operation="x"), ValueError, "operation 'x': expected one of"),
        (lambda s: s.choose("x", 1), ValueError, "operation 'x': expected one of"),
        (lambda s: s.set("allreduce", "mpi"), BackendUnavailable, "mpi is not possible here: local carries this"),
        (lambda s: s.set("allreduce", "shm"), BackendUnavailable, "shm is not possible here: all ranks are in one"),
        (lambda s: s.set("allreduce", "hierarchical"), BackendUnavailable, "all ranks are on one host"),
        (lambda s: s.set("allreduce", "ring", device="cuda"), BackendUnavailable, "ring is not possible here: "),
        (lambda s: s.set("allreduce", "nccl", device="cuda"), BackendUnavailable, "there is no CUDA device here"),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call(coll.selector)
    assert str(coll.selector) == before
    assert await coll.allreduce(1) == 2


# --- the same on all ranks -----------------------------------------------------------------------------------------


async def several(coll: Communicator) -> None:
    for _ in range(3):
        await coll.allreduce(torch.ones(1 << 18))


@pytest.mark.parametrize("awaits", [False, True])
def test_a6_ranks_that_edit_differently_are_told(awaits: bool) -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            handle = coll.selector.set("allreduce", "tree" if rank else "ring", above=1 << 20)
            if awaits:
                with pytest.raises(MismatchError) as seen:
                    await handle
                text = str(seen.value)
                assert "rank 0: cpu one allreduce 1MiB - ring; rank 1: cpu one allreduce 1MiB - tree" in text
            with pytest.raises((MismatchError, aiodist.CommunicatorAborted), match=r"the edit of the selector"):
                await several(coll)

    run_ranks(2, main)


def test_a6_a_rank_that_does_not_edit_is_told() -> None:
    async def main(rank: int) -> None:
        async with aiodist.init() as coll:
            handle: Handle[Any] = coll.selector.set("allreduce", "ring") if rank else coll.allreduce(torch.ones(4))
            with pytest.raises(MismatchError, match=r"rank 0: allreduce float32\[4\] sum at .*; rank 1: selector .*at"):
                await handle
            raise _Over

    with pytest.raises(_Over):
        run_ranks(2, main)


class _Over(Exception):
    pass


# --- what is made of it --------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
async def test_a6_what_is_made_of_it_follows(coll: Communicator) -> None:
    await coll.selector.set("allreduce", "ring", above=100)
    pair, outside = await coll.group([0, 1]), await coll.split(None if coll.rank == 0 else 1)
    twice = await (await coll.dup()).dup()
    made = [twice] + [pair] * (coll.rank < 2) + [outside] * (coll.rank > 0)
    assert [c.selector.choose("allreduce", 100) for c in made] == ["ring"] * len(made)
    coll.selector.set("allreduce", "tree", above=200)
    await twice.selector.set("allreduce", "halving", above=300)
    assert [c.selector.choose("allreduce", 200) for c in made] == ["tree"] * len(made)
    assert (coll.selector.choose("allreduce", 300), twice.selector.choose("allreduce", 300)) == ("tree", "halving")
    assert (await twice.allreduce(torch.ones(100))).tolist() == [3.0] * 100
    if coll.rank == 2:
        with pytest.raises(aiodist.CommunicatorError, match="outside"):
            pair.selector.set("allreduce", "ring")


@pytest.mark.ranks(2)
async def test_a6_an_edit_while_a_communicator_is_made(coll: Communicator, names: list[str]) -> None:
    making = coll.dup()
    coll.selector.set("allreduce", "ring", above=40)
    made = await making
    await made.allreduce(torch.ones(10))
    assert set(names) == {"ring"}
    await made.barrier()
    assert made.seq == 3  # the edit is one of its operations, on every rank


@pytest.mark.ranks(2)
async def test_a6_nn_chooses_through_it(coll: Communicator, names: list[str]) -> None:
    net = await nn.DataParallel.create(torch.nn.Linear(200, 100), coll)
    optimizer = torch.optim.SGD(net.module.parameters(), lr=0.1)

    def forward() -> Tensor:
        loss: Tensor = net(torch.full((4, 200), 1.0 + coll.rank)).square().mean()
        return loss

    await net.step(forward, optimizer)
    assert "halving" not in names
    await coll.selector.set("allreduce", "halving", above=1 << 10)
    await coll.barrier()
    names.clear()
    await net.step(forward, optimizer)
    await coll.barrier()
    assert names.count("halving") >= 2  # the gradients, 80 kB, on each rank
    (weight, _) = net.parameters()
    weights = await coll.allgather(weight.detach())
    assert torch.equal(weights[0], weights[1])


@pytest.mark.ranks(2, backend="mpi")
async def test_a6_an_edit_reaches_calls_that_were_planned(coll: Communicator, names: list[str]) -> None:
    t = torch.ones(64)
    for _ in range(3):
        t.fill_(1)
        assert (await coll.allreduce(t)).tolist() == [2.0] * 64
    assert names == []
    await coll.selector.set("allreduce", "doubling", above=256, below=257)
    t.fill_(1)
    assert (await coll.allreduce(t)).tolist() == [2.0] * 64
    assert names == ["doubling"]
    await coll.allreduce(torch.ones(65))
    assert names == ["doubling"]


@pytest.mark.ranks(2, backend="mpi")
async def test_a7_processes_of_one_host_share_memory(coll: Communicator) -> None:
    offers = coll.availability()
    assert [offers.of("allreduce", impl).state for impl in ("mpi", "shm")] == [OfferState.AVAILABLE] * 2
    assert offers.of("allreduce", "gloo").reason == "mpi carries this communicator: init(backend='gloo')"
    assert (await coll.allreduce(torch.ones(3), impl="shm")).tolist() == [2.0] * 3


# --- files ---------------------------------------------------------------------------------------------------------


def _choices(path: Path | None, ranks: int = 2) -> list[tuple[str, int]]:
    async def main(rank: int) -> tuple[str, int]:
        # Only rank 0's counts: the others need no such file.
        async with aiodist.init(selector=path if rank == 0 else path and path.with_name("of another rank")) as coll:
            await coll.barrier()
            return coll.selector.choose("allreduce", 5000), coll.selector.limits["ring.chunks"]

    return run_ranks(ranks, main)


def test_a6_a_file_is_rank_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.txt"
    path.write_text("# mine\ncpu one allreduce 4000 6000 ring # here\n\nlimit ring.chunks 2\n")
    assert _choices(path) == [("ring", 2)] * 2
    monkeypatch.setenv("AIODIST_SELECTOR", str(path))
    assert _choices(None) == [("ring", 2)] * 2
    monkeypatch.setenv("AIODIST_SELECTOR", "none")
    assert _choices(None) == [("direct", 4)] * 2


def test_a6_what_is_printed_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"

    async def main() -> str:
        async with aiodist.init(selector=path if path.exists() else None) as coll:
            if not path.exists():
                await coll.selector.set("broadcast", "chain", above=1 << 20)
                await coll.selector.set_limit("chunk_bytes", 1 << 19)
            await coll.barrier()
            return str(coll.selector)

    printed = run_ranks(2, main)[0]
    path.write_text(printed)
    assert run_ranks(2, main) == [printed] * 2
    assert "chunk_bytes               512KiB" in printed


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "cpu one allreduce 0 - ring\nwhat is this",
            r"t:2: 'what is this': expected DEVICE HOSTS OPERATION FROM BELOW",
        ),
        ("cpu one allreduce 0 ring", r"t:1: .*: expected DEVICE HOSTS OPERATION"),
        ("\ncpu one allredcue 0 - ring", r"t:2: operation 'allredcue': expected one of allreduce"),
        ("cpu one allreduce 0 - rign", r"t:1: implementation of allreduce 'rign': expected one of mpi, gloo"),
        ("gpu one allreduce 0 - ring", r"t:1: device 'gpu': expected one of cpu, cuda"),
        ("cpu two allreduce 0 - ring", r"t:1: hosts 'two': expected one of one, several"),
        ("cpu one allreduce 1k - ring", r"t:1: size '1k': expected bytes such as"),
        ("cpu one allreduce 2KiB 1KiB ring", r"t:1: sizes 2048 to 1024: expected"),
        ("cpu one scan 0 2KiB chain\ncpu one scan 1KiB - direct", r"t:2: .*\(line 1\) are about the same sizes"),
        ("limit ring.chunks", r"t:1: 'limit ring.chunks': expected limit NAME VALUE"),
        ("limit ring.chunks 0", r"t:1: limit ring.chunks 0: expected 1 to 32"),
        ("limit ring.chunks 2\nlimit ring.chunks 3", r"t:2: .*line 1 has set it already"),
        ("made-for torch 0.1", r"t:1: made for torch 0.1, but here it is 2\.[^:]*: aiodist tune makes another"),
        ("made-for moon 1", r"t:1: .*: expected made-for NAME VALUE, the name one of aiodist, torch, library"),
        ("cpu one allreduce 0 - shm", r"t:1: shm is not possible here: all ranks are in one process"),
        ("\xff", "utf-8|expected"),
        (None, "t: No such file or directory"),
    ],
)
def test_a6_a_bad_file_is_an_error_on_all_ranks_and_not_used(tmp_path: Path, text: str | None, cause: str) -> None:
    path = tmp_path / "t"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))

    async def main() -> str:
        try:
            async with aiodist.init(selector=path):
                return "it was opened"
        except (ConfigError, BackendUnavailable) as error:
            return str(error)

    said = run_ranks(2, main)
    assert said[0] == said[1]
    with pytest.raises(AssertionError, match=cause):
        raise AssertionError(said[0])


def test_a6_files_are_written_whole(tmp_path: Path) -> None:
    edits = [
        parse_edit("cpu one scan 0 1KiB chain"),
        parse_edit("cpu one scan 1KiB - direct"),
        parse_edit("limit ring.chunks 9"),
    ]
    here = {"torch": "2.0 of mine", "hosts": "1"}
    path = tmp_path / "sub" / "table"
    write(path, render(edits, here, "Two\nlines."))
    repertoire = Repertoire(LocalTransport(LocalHub(), 0, 2))
    assert read_edits(path, here, repertoire) == edits
    assert [p.name for p in path.parent.iterdir()] == ["table"]
    with pytest.raises(ConfigError, match=r"Not a directory|File exists"):
        write(path / "below", "")

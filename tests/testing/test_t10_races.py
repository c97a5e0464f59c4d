"""T10: results that differ by seed, and the receive from ANY that took another message."""

from __future__ import annotations

import asyncio
import math
import random
import re
import runpy
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

import aiodist
from aiodist import Communicator, DeadlockError
from aiodist.testing import Fault, Faults, RaceError, run_ranks

pytest_plugins = ["pytester"]
ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(20)


async def by_recv(coll: Communicator) -> list[int]:
    return [int(await coll.recv()) for _ in range(coll.size - 1)]


async def by_recv_into(coll: Communicator) -> list[int]:
    rooms = torch.zeros(coll.size - 1, dtype=torch.int64)
    for i in range(coll.size - 1):
        await coll.recv(rooms[i])
    return rooms.tolist()


async def by_handles(coll: Communicator) -> list[int]:
    handles = [coll.recv(tag=0) for _ in range(coll.size - 1)]
    await asyncio.gather(*handles)
    return [handle.source or 0 for handle in handles]


async def by_messages(coll: Communicator) -> list[int]:
    came: list[int] = []
    async for message in coll.messages():
        came.append(message.source)
        if len(came) == coll.size - 1:
            break
    return came


async def by_polling(coll: Communicator) -> list[int]:
    came = []
    for _ in range(coll.size - 1):
        receiving = coll.recv()
        while not receiving.done():  # noqa: ASYNC110  - the program is never idle
            await asyncio.sleep(0)
        came.append(int(await receiving))
    return came


async def by_thread(coll: Communicator) -> list[int]:
    return [int(await asyncio.to_thread(coll.recv().wait)) for _ in range(coll.size - 1)]


async def sorted_by_source(coll: Communicator) -> list[int]:
    return sorted(await by_recv(coll))


async def by_rank(coll: Communicator) -> list[int]:
    return [int(await coll.recv(src=src)) for src in reversed(range(1, coll.size))]


async def summed(coll: Communicator) -> list[int]:
    return [sum(await by_messages(coll))]


def program(receive: Callable[[Communicator], Awaitable[list[int]]]) -> Callable[[], Any]:
    """Return a program whose rank 0 receives a message of each other rank."""

    async def main() -> list[int] | None:
        async with aiodist.init() as coll:
            if coll.rank == 0:
                return await receive(coll)
            await coll.send(torch.tensor(coll.rank), 0)
            return None

    return main


@pytest.mark.parametrize("n", [3, 4, pytest.param(6, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("receive", [by_recv, by_recv_into, by_handles, by_messages, by_polling])
def test_t10_a_race_is_found_and_both_seeds_are_named(n: int, receive: Any) -> None:
    main = program(receive)
    with pytest.raises(RaceError) as caught:
        run_ranks(n, main, seeds=SEEDS)
    one, other = caught.value.seeds
    assert one == 0 < other < 20
    results = [run_ranks(n, main, seeds=[seed])[0] for seed in (one, other)]
    assert results[0] != results[1]
    at = next(i for i in range(n - 1) if results[0][i] != results[1][i])
    said = str(caught.value)
    assert said.startswith(f"results[0][{at}] differs by seed\n")
    for seed, result in zip((one, other), results, strict=True):
        assert f"\n  seed {seed}: {result[at]} in {result}\n" in said
        assert f"\n  seed {seed}: rank {result[at]} sent it, with tag 0\n" in said
    line = receive.__code__.co_firstlineno
    assert any(f"{__file__}:{line + i} in " in said for i in range(8))
    assert "from ANY, on rank 0 of 'world', differs first:" in said
    assert f"seeds=[{one}, {other}]" in said


@pytest.mark.thorough
def test_t10_a_thread_that_waits_for_a_message_gets_it() -> None:
    with pytest.raises(RaceError):
        run_ranks(3, program(by_thread), seeds=SEEDS)


@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(5, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("receive", [sorted_by_source, by_rank, summed])
def test_t10_a_program_whose_order_alone_differs_passes(n: int, receive: Any) -> None:
    if n == 1 and receive is summed:
        return  # no message would come
    main, runs = program(receive), count()

    async def counted() -> Any:
        return next(runs), await main()

    with pytest.raises(RaceError):
        run_ranks(n, counted, seeds=[0, 1])
    assert run_ranks(n, main, seeds=SEEDS) == run_ranks(n, main, seeds=[99])


@pytest.mark.parametrize(
    "steps", [1, pytest.param(4, marks=pytest.mark.thorough), pytest.param(10, marks=pytest.mark.thorough)]
)
def test_t10_a_message_may_come_after_many_steps_of_others(steps: int) -> None:
    """Rank 1 sends at its first line, rank 2 after messages to and from rank 3."""

    async def main() -> Any:
        async with aiodist.init() as coll:
            if coll.rank == 0:
                return await by_recv_two(coll)
            for _ in range(steps):
                if coll.rank == 2:
                    await coll.send(torch.tensor(0), 3)
                    await coll.recv(src=3)
                elif coll.rank == 3:
                    await coll.recv(src=2)
                    await coll.send(torch.tensor(0), 2)
            if coll.rank in (1, 2):
                await coll.send(torch.tensor(coll.rank), 0)
            return None

    async def by_recv_two(coll: Communicator) -> list[int]:
        return [int(await coll.recv()) for _ in range(2)]

    assert {tuple(run_ranks(4, main, seeds=[seed])[0]) for seed in range(40)} == {(1, 2), (2, 1)}


@pytest.mark.thorough
def test_t10_each_order_of_four_messages_comes() -> None:
    seen = Counter(tuple(run_ranks(4, program(by_recv), seeds=[seed])[0]) for seed in range(90))
    assert len(seen) == 6
    assert min(seen.values()) >= 4


def test_t10_a_seed_gives_the_same_run_a_hundred_times() -> None:
    async def main() -> Any:
        log = []
        async with aiodist.init() as coll:
            for turn in range(2):
                sends = [coll.send(torch.tensor(turn), dst, tag=turn) for dst in range(coll.size)]
                log += [(int(await (receiving := coll.recv())), receiving.source) for _ in range(coll.size)]
                await aiodist.gather(*sends)
            return log

    once = {seed: run_ranks(3, main, seeds=[seed]) for seed in (3, 8)}
    assert once[3] != once[8]
    assert all(run_ranks(3, main, seeds=[seed]) == once[seed] for seed in (3, 8) for _ in range(50))


def test_t10_an_error_of_one_seed_is_raised_with_its_seed() -> None:
    async def first_is_2(coll: Communicator) -> Any:
        came = await by_recv(coll)
        assert came[0] == 2, f"first came {came[0]}"

    main = program(first_is_2)
    with pytest.raises(AssertionError, match=r"first came [13]") as caught:
        run_ranks(4, main, seeds=(seed for seed in range(9, 99)))
    notes = "\n".join(caught.value.__notes__)
    seed = int(notes.partition("seeds=[")[2].partition("]")[0])
    assert f"raised by rank 0 of 4 (aiodist.testing, seeds=[{seed}])" in notes
    with pytest.raises(AssertionError, match=str(caught.value)):
        run_ranks(4, main, seeds=[seed])
    if seed > 9:
        assert "seed 9 raises nothing. Message 1 of recv at " in notes
        assert "rank 2 sent it" in notes


def test_t10_a_deadlock_of_one_seed_is_raised_with_its_seed() -> None:
    async def again_from_1(coll: Communicator) -> Any:
        if int(await coll.recv()) == 1:
            await coll.recv(src=1)
        await coll.recv()

    ended = [seed for seed in SEEDS if run_until_deadlock(program(again_from_1), seed)]
    assert 0 < len(ended) < 20
    with pytest.raises(DeadlockError) as caught:
        run_ranks(3, program(again_from_1), seeds=ended[:1] + [seed for seed in SEEDS if seed not in ended])
    notes = "\n".join(caught.value.__notes__)
    assert f"seeds=[{min(set(SEEDS) - set(ended))}])" in notes
    assert f"seed {ended[0]} raises nothing. Message 1 of recv at {__file__}" in notes


def run_until_deadlock(main: Callable[[], Any], seed: int) -> bool:
    try:
        run_ranks(3, main, seeds=[seed])
    except DeadlockError:
        return False
    return True


@dataclass
class Point:
    x: float
    history: list[int]


class Colour(Enum):
    RED = 1
    BLUE = 2


class Plain:
    def bound(self) -> None:
        """A method of an object without equality."""


LOOP: list[Any] = [1]
LOOP.append(LOOP)
T = torch.arange(2000.0)
NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        (1, 2, ""),
        (1, True, ""),
        (1, 1.0, ""),
        (0.0, -0.0, ""),
        (1 + 0j, complex(1, -0.0), ""),
        ("a", b"a", ""),
        ([1, 2], (1, 2), ""),
        ([1, [2, {"k": 3}]], [1, [2, {"k": 4}]], "[1][1]['k']"),
        ([1], [1, 2], ""),
        ({"a": 1}, {"b": 1}, ""),
        ({1, 2}, {1, 3}, ""),
        (Point(1.0, [2]), Point(1.0, [3]), ".history[0]"),
        (Colour.RED, Colour.BLUE, ""),
        (ValueError(1), ValueError(2), ".args[0]"),
        (torch.zeros(2), -torch.zeros(2), ""),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), ""),
        (torch.zeros(2), torch.zeros(2, 1), ""),
        (NAN, torch.tensor([math.nan]), ""),
        (T.to(torch.bfloat16), (T + 2**-3).to(torch.bfloat16), ""),
        (np.zeros(3), np.zeros(3, np.float32), ""),
        (np.float64(1), np.float64(2), ""),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), ".weight"),
    ],
)
def test_t10_results_that_differ(one: Any, other: Any, path: str) -> None:
    """The program is no race, but depends on the run: the error says so, and shows where the results differ."""
    values = iter([one, other, one])

    async def main() -> Any:
        return [next(values)]

    with pytest.raises(RaceError) as caught:
        run_ranks(1, main, seeds=[4, 5])
    assert str(caught.value).startswith(f"results[0][0]{path} differs by seed\n  seed 4: ")
    assert "Two runs with seed 5 differ too." in str(caught.value)
    assert caught.value.seeds == (4, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [math.nan, complex(math.nan, 0), NAN.clone(), np.float32("nan"), np.array([math.nan])],
        lambda: dict(random.SystemRandom().sample(sorted({"a": 1, "b": 2, "c": 3}.items()), 3)),
        lambda: LOOP,
        lambda: [Plain(), Colour, Plain, len, Plain().bound, lambda: 1],
        lambda: [{Colour.RED}, frozenset("abc"), b"", None, ..., 10**30],
        lambda: Point(0.1 + 0.2, [1]),
        lambda: torch.eye(3).to_sparse(),
        lambda: [torch.empty(0), torch.tensor(3), T[::7], T.view(40, 50).t(), T.requires_grad_()],
        lambda: [torch.tensor([1 + 2j]).conj(), np.array(["a", "b"]), np.array([None, 2])],
        lambda: (torch.rand(3), random.random(), np.random.rand(), torch.randperm(9)),
        lambda: KeyError("a", [1]),
    ],
)
def test_t10_results_that_are_equal(make: Callable[[], Any]) -> None:
    async def main() -> Any:
        return make()

    run_ranks(1, main, seeds=range(3))


def test_t10_the_first_element_of_a_large_tensor_that_differs_is_shown() -> None:
    async def main() -> Any:
        async with aiodist.init() as coll:
            t = torch.zeros(50, 40, dtype=torch.float64)
            if coll.rank == 0:
                for i in range(coll.size - 1):
                    t[30, 20 + i] = await coll.recv()
            else:
                await coll.send(torch.tensor(coll.rank + 0.5), 0)
            return {"t": t}

    with pytest.raises(RaceError) as caught:
        run_ranks(3, main, seeds=SEEDS)
    first, second = str(caught.value).splitlines()[1:3]
    assert sorted(["1.5", "2.5"]) == sorted(line.partition("element [30, 20] is ")[2][:3] for line in (first, second))


def test_t10_results_that_differ_without_a_receive_from_any() -> None:
    """The first of two handles to finish decides."""

    async def main() -> Any:
        async with aiodist.init() as coll:
            if coll.rank:
                await coll.send(torch.tensor(coll.rank), 0)
                return None
            receives = [coll.recv(src=src) for src in (1, 2)]
            return [int(await handle) async for handle in aiodist.as_completed(receives)]

    with pytest.raises(RaceError, match="Each receive from ANY took the same messages"):
        run_ranks(3, main, seeds=SEEDS)


def test_t10_a_result_that_the_next_run_changes_is_compared_as_it_was() -> None:
    log: list[int] = []

    async def main() -> Any:
        log.append(len(log))
        return log

    with pytest.raises(RaceError, match=r"results\[0\] differs by seed\n  seed 0: \[0\]\n  seed 1: \[0, 1\]\n"):
        run_ranks(1, main, seeds=[0, 1])


def test_t10_faults_strike_with_each_seed() -> None:
    async def main() -> Any:
        try:
            async with aiodist.init() as coll:
                return int(await coll.allreduce(1))
        except aiodist.AiodistError as error:
            return type(error).__name__

    faults = Faults(Fault("kill", rank=1, at=0))
    assert run_ranks(3, main, seeds=range(4), faults=faults) == ["PeerLost", None, "PeerLost"]


def test_t10_seeds_are_not_empty() -> None:
    with pytest.raises(ValueError, match="seeds is empty: expected at least one seed"):
        run_ranks(2, program(by_rank), seeds=[])


def test_t10_the_page_shows_what_its_program_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/races.md").read_text(encoding="utf-8")
    program, output = re.findall(r"```python\n(# test_squares.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)[0]
    path = tmp_path / "test_squares.py"
    path.write_text(program)
    runpy.run_path(str(path))
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "") == output


def test_t10_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    docstring, main = (names := runpy.run_path(str(ROOT / "examples/any_order.py")))["__doc__"], names["main"]
    main()
    assert capsys.readouterr().out == dedent(docstring.partition("prints\n\n")[2])


def test_t10_a_test_runs_with_each_seed(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile("""
        import pytest, torch

        async def first(coll):
            if coll.rank:
                await coll.send(torch.tensor(coll.rank), 0)
                return None
            return [int(await coll.recv()) for _ in range(coll.size - 1)]

        @pytest.mark.ranks(3)
        async def test_by_option(coll):
            return await first(coll)

        @pytest.mark.ranks(3, seeds=[7])
        async def test_by_mark(coll):
            return await first(coll)

        @pytest.mark.ranks(2, 3, seeds=range(20))
        async def test_right(coll):
            return sum(await first(coll) or [])
        """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-v", "--aiodist-seeds=20")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*::test_by_option?3? FAILED*", "*RaceError: results?0??0? differs by seed"])

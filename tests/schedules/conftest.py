"""`simulate`: runs the plans of all ranks of an operation in one go, with queues in place of a transport.

An element is a pair: the first number is summed (wrapping), the second is combined by something that is neither
commutative nor associative, so that two equal results were combined in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pytest

from aiodist.schedules import MAX_LANES, SCHEDULES, Blocks, Lane, Recv, Schedule, Send, in_fixed_order
from benchmarks.schedule_costs import Cost

Array = npt.NDArray[np.uint64]  # (2, elements)

_COMBINE = np.array([[1], [31]], dtype=np.uint64)
_NOISE = np.random.default_rng(1).integers(1 << 63, size=(2, 90_000), dtype=np.uint64)


def fresh(rank: int, n: int) -> Array:
    """Return `n` elements of a rank, all different."""
    return _NOISE[:, rank * 1000 :][:, :n].copy()


def combine(into: Array, other: Array) -> None:
    into *= _COMBINE
    into += other


def in_order(parts: Sequence[Array]) -> Array:
    """Combine the two halves of a power of two of the parts, or such a power, the largest, with the rest."""
    if len(parts) == 1:
        return parts[0].copy()
    half = 1 << (len(parts) - 1).bit_length() - 1
    total = in_order(parts[:half])
    combine(total, in_order(parts[half:]))
    return total


class _Runner:
    """A running lane of a rank."""

    def __init__(self, rank: int, number: int, lane: Lane, buffer: Array) -> None:
        self.rank = rank
        self.number = number
        self.buffer = buffer
        self.steps = lane()
        self.left = 0
        self.after: list[tuple[Array, Array, bool]] = []
        self.ended = False


class World:
    """Ranks with their buffers. Sends end immediately if `buffered`, otherwise when their receive has matched."""

    def __init__(self, buffered: bool) -> None:
        self.buffered = buffered
        self.sent: dict[tuple[int, int, int], deque[tuple[Array, _Runner | None]]] = {}
        self.wanted: dict[tuple[int, int, int], deque[tuple[Array, _Runner]]] = {}
        self.ready: deque[_Runner] = deque()
        self.costs: list[list[int]] = []

    def run(self, plans: Sequence[Schedule], buffers: Sequence[Array]) -> None:
        runners = []
        for rank, (plan, buffer) in enumerate(zip(plans, buffers, strict=True)):
            assert buffer.shape[1] == plan.room
            assert len(plan.lanes) <= MAX_LANES
            runners += [_Runner(rank, number, lane, buffer) for number, lane in enumerate(plan.lanes)]
            self.costs.append([0, 0])
        self.ready.extend(runners)
        while self.ready:
            self._advance(self.ready.popleft())
        stuck = sorted({runner.rank for runner in runners if not runner.ended})
        assert not stuck, f"ranks {stuck} wait for ever"
        assert not any(self.sent.values()), "somebody sent what nobody received"

    def _advance(self, runner: _Runner) -> None:
        while not runner.left:
            for into, other, combining in runner.after:
                if combining:
                    combine(into, other)
                else:
                    into[:] = other
            runner.after = []
            step = next(runner.steps, None)
            if step is None:
                runner.ended = True
                return
            runner.left = 1  # not over from within
            for move in step:
                assert move.start < move.stop <= runner.buffer.shape[1]
                view = runner.buffer[:, move.start : move.stop]
                if isinstance(move, Send):
                    self._send(runner, move.peer, view)
                elif isinstance(move, Recv):
                    self._recv(runner, move, view)
                else:
                    to = runner.buffer[:, move.to : move.to + move.stop - move.start]
                    runner.after.append((to, view, move.combine))
            runner.left -= 1

    def _send(self, runner: _Runner, peer: int, view: Array) -> None:
        cost = self.costs[runner.rank]
        cost[0] += 1
        cost[1] += view.shape[1]
        key = (runner.rank, peer, runner.number)
        wanted = self.wanted.get(key)
        if wanted:
            into, receiver = wanted.popleft()
            self._arrive(into, view, receiver)
        elif self.buffered:
            self.sent.setdefault(key, deque()).append((view.copy(), None))
        else:
            runner.left += 1
            self.sent.setdefault(key, deque()).append((view, runner))

    def _recv(self, runner: _Runner, move: Recv, view: Array) -> None:
        if move.combine:
            scratch = np.empty_like(view)
            runner.after.append((view, scratch, True))
            view = scratch
        runner.left += 1
        key = (move.peer, runner.rank, runner.number)
        sent = self.sent.get(key)
        if sent:
            data, sender = sent.popleft()
            self._arrive(view, data, runner)
            if sender is not None:
                self._one_done(sender)
        else:
            self.wanted.setdefault(key, deque()).append((view, runner))

    def _arrive(self, into: Array, data: Array, receiver: _Runner) -> None:
        assert into.shape == data.shape, f"{data.shape[1]} elements met a receive of {into.shape[1]}"
        into[:] = data
        self._one_done(receiver)

    def _one_done(self, runner: _Runner) -> None:
        runner.left -= 1
        if not runner.left:
            self.ready.append(runner)


class Simulation:
    """Runs an operation on all ranks, checks each result, and returns what the busiest rank sent."""

    def __init__(self, buffered: bool = False) -> None:
        self.buffered = buffered

    def run(self, plans: Sequence[Schedule], givens: Sequence[Array]) -> tuple[list[Array], Cost]:
        """Put what is given at the start of each rank's working buffer."""
        world = World(self.buffered)
        buffers = []
        for rank, (plan, given) in enumerate(zip(plans, givens, strict=True)):
            buffer = fresh(rank + 7, plan.room)
            buffer[:, : given.shape[1]] = given
            buffers.append(buffer)
        world.run(plans, buffers)
        return buffers, Cost(max(cost[0] for cost in world.costs), max(cost[1] for cost in world.costs))

    def elementwise(self, operation: str, name: str, size: int, n: int, root: int | None = None, **chunks: int) -> Cost:
        """Run allreduce, scan, broadcast or reduce."""
        plan = SCHEDULES[operation][name].plan
        rooted = () if root is None else (root,)
        givens = [fresh(rank, n) for rank in range(size)]
        plans = [plan(rank, size, n, *rooted, **chunks) for rank in range(size)]
        buffers, cost = self.run(plans, givens)
        results = [buffer[:, :n] for buffer in buffers]
        if operation == "broadcast":
            assert all(np.array_equal(result, givens[root or 0]) for result in results)
        elif operation == "scan":
            expected = list(accumulate((given[0] for given in givens), np.add))
            assert all(np.array_equal(result[0], total) for result, total in zip(results, expected, strict=True))
        else:
            total = in_order(givens)
            for rank, result in enumerate(results):
                if operation == "reduce" and rank != root:
                    assert np.array_equal(result, givens[rank])
                    continue
                assert np.array_equal(result[0], total[0])
                ordered = in_fixed_order(operation, name, size)
                assert np.array_equal(result[1], total[1] if ordered else results[root or 0][1])
        return cost

    def allgather(self, name: str, counts: Sequence[int] | Blocks, **chunks: int) -> Cost:
        blocks = counts if isinstance(counts, Blocks) else Blocks(counts)
        size = blocks.parts
        expected = fresh(0, blocks.total)
        givens = []
        for rank in range(size):
            given = fresh(rank + 1, blocks.total)
            mine = slice(blocks.start(rank), blocks.stop(rank))
            given[:, mine] = expected[:, mine]
            givens.append(given)
        plan = SCHEDULES["allgather"][name].plan
        buffers, cost = self.run([plan(rank, size, blocks, **chunks) for rank in range(size)], givens)
        assert all(np.array_equal(buffer[:, : blocks.total], expected) for buffer in buffers)
        return cost

    def reduce_scatter(self, name: str, counts: Sequence[int] | Blocks, **chunks: int) -> Cost:
        blocks = counts if isinstance(counts, Blocks) else Blocks(counts)
        size, n = blocks.parts, blocks.total
        givens = [fresh(rank, n) for rank in range(size)]
        plan = SCHEDULES["reduce_scatter"][name].plan
        buffers, cost = self.run([plan(rank, size, blocks, **chunks) for rank in range(size)], givens)
        total = in_order(givens)
        rows = slice(None) if in_fixed_order("reduce_scatter", name, size) else slice(1)
        for rank, buffer in enumerate(buffers):
            assert np.array_equal(buffer[:, :n], givens[rank])
            block = total[rows, blocks.start(rank) : blocks.stop(rank)]
            assert np.array_equal(buffer[rows, n : n + blocks.count(rank)], block)
        return cost

    def alltoall(self, name: str, counts: npt.NDArray[np.int64]) -> Cost:
        """Rank i sends counts[i, j] elements to rank j."""
        size = len(counts)
        sends = [Blocks(row.tolist()) for row in counts]
        receives = [Blocks(column.tolist()) for column in counts.T]
        givens = [fresh(rank, sends[rank].total) for rank in range(size)]
        plan = SCHEDULES["alltoall"][name].plan
        buffers, cost = self.run([plan(r, size, sends[r], receives[r]) for r in range(size)], givens)
        for rank, buffer in enumerate(buffers):
            n = sends[rank].total
            assert np.array_equal(buffer[:, :n], givens[rank])
            parts = [givens[src][:, sends[src].start(rank) : sends[src].stop(rank)] for src in range(size)]
            assert np.array_equal(buffer[:, n : n + receives[rank].total], np.concatenate(parts, axis=1))
        return cost


@pytest.fixture(scope="session")
def simulate() -> Simulation:
    """Ranks whose sends end when they have met their receive: what gets through here gets through anywhere."""
    return Simulation()


@pytest.fixture(scope="session")
def buffered() -> Simulation:
    """Ranks whose sends end immediately, as those of short messages."""
    return Simulation(buffered=True)

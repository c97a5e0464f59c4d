"""Runs operations among the ranks of a host, one after another, in the order that the first rank chooses.

Each operation is cut into rounds. In a round every rank works on a part of its own, in the memory of all: what lies in
an arena is read and written where it is. A rank whose tensor is private copies a round's piece of it into a stage in
its arena ahead of the round (*fills*), and what others wrote there back afterwards (*drains*); with two stages in
turn, one rank fills or drains while another works. Ranks meet when an operation begins and when it ends, and in
between only where something is staged.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from aiodist.backends.base import ours
from aiodist.backends.shm.boards import FILLED, KEY, NUMBER, WORKED, Boards, Post
from aiodist.backends.shm.memory import Place
from aiodist.backends.shm.neighbours import Neighbourhood
from aiodist.backends.shm.rounds import STAGES, Rounds
from aiodist.backends.shm.works import Task, described
from aiodist.errors import AiodistError, BackendError, MismatchError
from aiodist.handles import LARGE_BYTES, Progress

__all__ = ["INLINE_BYTES", "Group", "Groups"]

_STAGED_BYTES = 1 << 20  # of all parts of one stage
_LEAST_PIECE = 1 << 16
_PIECE_BYTES = 1 << 18  # what is worked on at once where nothing is staged: it stays in the caches
INLINE_BYTES = 2 * LARGE_BYTES
"""From here on the progress thread works: a round lasts 50 us, so shorter ones do not hold up the loop."""

_ROUNDS_AT_ONCE = 4  # of those: looking at everything else in between takes 10 us
_HURRIED_BYTES = 1 << 20
_MOST_KNOWN = 256  # operations whose rounds are kept: programs reduce the same tensors again and again
_LOOK_PASSES = 64  # how often nothing may move before the sockets are looked at

Steps = Generator[bool, None, None]  # yields whether anything moved, or there is nothing to do but wait


class Groups:
    """All groups of one loop, as `Progress` polls them."""

    rings = True

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._busy: list[Group] = []

    def __len__(self) -> int:
        return len(self._busy)

    def add(self, group: Group) -> None:
        """Poll `group` until it has nothing left to do."""
        self._busy.append(group)
        if len(self._busy) == 1:  # while there is nothing to do here, others are polled more quickly
            self.progress.add_poller(self)

    def poll(self, until: float = 0.0) -> bool:
        """Move every operation on; True when one moved."""
        while True:
            moved = False
            for group in tuple(self._busy):
                if group.advance():
                    moved = True
                if not group.busy:
                    self._busy = [busy for busy in self._busy if busy is not group]  # given up meanwhile, perhaps
            if not self._busy:
                self.progress.remove_poller(self)
                return moved
            if moved or perf_counter() >= until:
                return moved

    def close(self) -> None:
        """Poll no more."""
        self._busy.clear()
        self.progress.remove_poller(self)


class Group:
    """Some ranks of this host and their operations; everything runs with the transport lock held."""

    def __init__(self, near: Neighbourhood, groups: Groups, name: str, ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the world ranks in the group's order, of which this one is number `rank`."""
        self.size = len(ranks)
        self.rank = rank
        self._near = near
        self._groups = groups
        self._ranks = list(ranks)
        self._boards = Boards(near, f"{name}", ranks, rank)
        self._queue: list[Task] = []
        self._number = 0
        self._count = 0  # of rounds in all operations so far: FILLED and WORKED never go back
        self._known: dict[tuple[tuple[int, ...], ...], Rounds] = {}
        self._steps: Steps | None = None
        self._idle = 0
        self._stage: Tensor | None = None
        self._refusal: BaseException | None = None
        self._left = False
        self.arena_bytes = 0
        """Of this rank's tensors that were worked on where they lay."""
        self.ordinary_bytes = 0
        """Of those that the others could not reach."""

    @property
    def busy(self) -> bool:
        """There is something to do or to wait for."""
        return self._steps is not None

    def submit(self, task: Task) -> None:
        """Have `task` done, and its `done` called."""
        if self._refusal is not None:
            task.done(self._refusal)
            return
        # What is staged lasts longer, and wants the GIL more often: the thread's already at half the size.
        if task.nbytes >= INLINE_BYTES or (task.nbytes >= LARGE_BYTES and self._near.locate(task.tensor) is None):
            task.done = self._groups.progress.counted(task.done)
        elif task.nbytes >= _HURRIED_BYTES:  # each of its kernels lets go of the GIL, and wants it back
            task.done = self._groups.progress.hurried(task.done)
        self._queue.append(task)
        if self._steps is None:
            self._steps = self._all()
            self._groups.add(self)
            self.advance()

    def advance(self) -> bool:
        """Take the next step; True when something moved."""
        if self._steps is None:
            return False
        try:
            moved = next(self._steps)
        except StopIteration:
            self._steps = None
            return True
        except Exception as error:  # noqa: BLE001  - it belongs to the tasks that await the operations
            # The others wait for what this rank has to say of the next: nothing can follow.
            self._steps = None
            self._refusal = ours(error)
            self._fail(self._refusal)
            return True
        self._idle = 0 if moved else self._idle + 1
        if self._idle % _LOOK_PASSES == _LOOK_PASSES - 1 or not self._near.ordered:
            self._boards.look()
        return moved

    def give_up(self, error: BaseException) -> None:
        """Touch nobody's memory any more: what is left to do fails with `error`."""
        if not self._left:
            self._left = True
            self._boards.leave()
        self._refusal = error
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while self._queue:
            self._tell_end(self._queue.pop(), error)

    def _tell_end(self, task: Task, error: BaseException | None) -> None:
        try:
            task.done(error)
        except Exception as raised:  # noqa: BLE001  - those behind it go on
            self._groups.progress.report("what an operation in shared memory completed failed", raised)

    # --- one operation after another -------------------------------------------------------------------------

    def _all(self) -> Steps:
        while self._queue:
            self._number += 1
            task = yield from self._agree()
            try:
                yield from self._do(task)
            except AiodistError as error:
                failure: BaseException | None = error
            except Exception as error:  # noqa: BLE001  - it belongs to the task that awaits the operation
                # The others wait for a round that never ends: nothing can follow it.
                failure = self._refusal = BackendError(f"{described(task.work.facts)} failed: {error}")
                failure.__cause__ = error
            else:
                failure = None
                if task.reached:
                    self.arena_bytes += task.tensor.nbytes
                else:
                    self.ordinary_bytes += task.tensor.nbytes
            self._queue.remove(task)
            self._tell_end(task, failure)
            if self._refusal is not None:
                self._fail(self._refusal)
            yield True

    def _agree(self) -> Generator[bool, None, Task]:
        """Return the next operation, once all ranks have posted their parts of it.

        The first rank says which it is, since the others may have begun operations of several steps in another
        order; they propose what they would take next, which nearly always is the same.
        """
        boards, number = self._boards, self._number
        while not boards.all and not boards.meet():
            yield False
        first = boards.all[0].words
        proposed: Task | None = None
        while True:
            chosen = self._queue[0] if self.rank == 0 else proposed or self._queue[0]
            if self.rank and first[NUMBER] == number and first[KEY] != chosen.key:
                chosen = next((task for task in self._queue if task.key == first[KEY]), chosen)
            if chosen is not proposed:
                proposed = chosen
                self._post(chosen)
            key = proposed.key
            for words in boards.others:
                if words[NUMBER] != number or words[KEY] != key:
                    break
            else:
                return proposed
            yield False

    def _post(self, task: Task) -> None:
        work, rank = task.work, self.rank
        window = stage = None
        if work.window_numel(rank):
            window = self._near.locate(task.tensor)
            if window is None and (work.reads(rank) or work.writes(rank)):
                stage = self._own_stage()
                if work.reads(rank):  # what the first round needs is there as soon as anybody asks
                    self._alone(task).fill(0, self._stage)
                    self._boards.mine.words[FILLED] = self._count + 1
        task.reached = window is not None
        self._boards.mine.write(self._number, task.key, work.facts, window, stage)
        self._boards.ring()

    def _own_stage(self) -> Place:
        if self._stage is None:
            with torch.inference_mode(False):
                self._stage = self._near.arena.empty((STAGES * self._stage_bytes,), torch.uint8)
        place = self._near.locate(self._stage)
        assert place is not None
        return place

    @property
    def _stage_bytes(self) -> int:
        return self.size * max(_STAGED_BYTES // self.size // _LEAST_PIECE, 1) * _LEAST_PIECE

    def _do(self, task: Task) -> Steps:
        said = tuple([board.read() for board in self._boards.all])
        rounds = self._known.get(said)
        differ = False
        if rounds is None:
            posts = [Post.of(values) for values in said]
            differ = any(post.facts != posts[0].facts for post in posts)
            if task.work.longest and not differ:
                rounds = self._rounds_of(task, posts)
                if rounds.cached:
                    if len(self._known) >= _MOST_KNOWN:
                        self._known.clear()
                    self._known[said] = rounds
        if rounds is None:
            self._count += 1
            self._tell(WORKED, self._count)
        else:
            yield from self._perform(task, rounds)
        # Nobody goes on, and says something else, before all have seen what was said of this one.
        yield from self._wait(WORKED, self._count)
        if differ:
            sides = "; ".join(f"rank {rank}: {described(post.facts)}" for rank, post in enumerate(posts))
            raise MismatchError(f"ranks disagree on an operation in shared memory: {sides}")

    # --- rounds -----------------------------------------------------------------------------------------------

    def _rounds_of(self, task: Task, posts: Sequence[Post]) -> Rounds:
        reached = all(post.window is not None for post in posts)
        work = (task.work.in_place if reached else None) or task.work
        staged = [post.stage is not None for post in posts]
        nbytes = self._stage_bytes // work.parts if any(staged) else _PIECE_BYTES
        cached = work.steady and reached
        memory = [self._memory(task, rank, post, cached) for rank, post in enumerate(posts)]
        return Rounds(work, nbytes // work.dtype.itemsize, staged, memory, cached=cached)

    def _alone(self, task: Task) -> Rounds:
        """Return the rounds of an operation before anything is known of the others."""
        work, window = task.work, task.window
        piece = self._stage_bytes // work.parts // work.dtype.itemsize
        return Rounds(work, piece, [True] * self.size, [window] * self.size, cached=False)

    def _memory(self, task: Task, rank: int, post: Post, cached: bool) -> Tensor:
        """Return what is to be looked at of the memory of `rank`: its window, or its stage."""
        work, place = task.work, post.window or post.stage
        if place is None or (rank == self.rank and not cached):
            return task.window
        kind = work.dtype
        nbytes = STAGES * self._stage_bytes if post.stage is not None else work.window_numel(rank) * kind.itemsize
        if rank == self.rank:
            return self._near.arena.memory(place, nbytes).view(kind)
        return self._near.neighbours[self._ranks[rank]].memory(place, nbytes).view(kind)

    def _perform(self, task: Task, rounds: Rounds) -> Steps:
        base, self._count = self._count, self._count + rounds.count
        out = rounds.memory[self.rank] if rounds.cached else task.out
        if any(rounds.staged):
            yield from self._staged(rounds, base, out)
            return
        for j in range(rounds.count):
            rounds.work_on(j, out)
            if j % _ROUNDS_AT_ONCE == _ROUNDS_AT_ONCE - 1 and j + 1 < rounds.count:
                yield True
        self._tell(WORKED, self._count)

    def _staged(self, rounds: Rounds, base: int, out: Tensor) -> Steps:
        work, me = rounds.work, self.rank
        fills = rounds.staged[me] and work.reads(me)
        drains = rounds.staged[me] and work.writes(me)
        readable = [i for i, staged in enumerate(rounds.staged) if staged and i != me and work.reads(i)]
        filled = 1
        for j in range(rounds.count):
            while fills and filled < min(j + STAGES, rounds.count):
                # What was in that stage before has been worked on by everybody.
                yield from self._wait(WORKED, base + filled + 1 - STAGES)
                rounds.fill(filled, self._stage)
                filled += 1
                self._tell(FILLED, base + filled)
                yield True
            for rank in readable:
                words = self._boards.all[rank].words
                while words[FILLED] < base + j + 1:
                    yield False
            rounds.work_on(j, out)
            self._tell(WORKED, base + j + 1)
            yield True
            if drains:
                yield from self._wait(WORKED, base + j + 1)
                rounds.drain(j, self._stage)
                yield True

    def _tell(self, which: int, count: int) -> None:
        self._boards.mine.words[which] = count
        self._boards.ring()

    def _wait(self, which: int, count: int) -> Steps:
        for words in self._boards.others:
            while words[which] < count:
                yield False

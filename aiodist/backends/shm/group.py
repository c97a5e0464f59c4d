"""Runs operations among the ranks of a host, one after another, in the order that the first rank chooses.

Each operation is cut into rounds. In a round every rank works on a part of its own, in the memory of all: what lies in
an arena is read and written where it is. A rank whose tensor is private copies a round's piece of it into a stage in
its arena ahead of the round (*fills*), and what others wrote there back afterwards (*drains*); with two stages in
turn, one rank fills or drains while another works. Ranks meet when an operation begins and when it ends, and in
between only where something is staged.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from time import perf_counter

import torch
from torch import Tensor

from aiodist.backends.inplace import writable
from aiodist.backends.shm.boards import FILLED, KEY, NUMBER, WORKED, Boards, Post
from aiodist.backends.shm.neighbours import Neighbourhood
from aiodist.backends.shm.works import Work
from aiodist.errors import AiodistError, BackendError, MismatchError
from aiodist.handles import LARGE_BYTES, Progress

__all__ = ["Group", "Groups"]

_STAGES = 2
_STAGED_BYTES = 1 << 20  # of all parts of one stage
_LEAST_PIECE = 1 << 16
_PIECE_BYTES = 1 << 18  # what is worked on at once where nothing is staged: it stays in the caches
_LOOK_PASSES = 64  # how often nothing may move before the sockets are looked at

Steps = Generator[bool, None, None]  # yields whether anything moved, or there is nothing to do but wait


class Groups:
    """All groups of one loop, as `Progress` polls them."""

    rings = True

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._busy: list[Group] = []
        progress.add_poller(self)

    def __len__(self) -> int:
        return len(self._busy)

    def add(self, group: Group) -> None:
        """Poll `group` until it has nothing left to do."""
        self._busy.append(group)

    def poll(self, until: float = 0.0) -> bool:
        """Move every operation on; True when one moved."""
        while True:
            moved = False
            for group in tuple(self._busy):
                if group.advance():
                    moved = True
                if not group.busy:
                    self._busy.remove(group)
            if moved or perf_counter() >= until:
                return moved

    def close(self) -> None:
        """Poll no more."""
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
        self._queue: list[Work] = []
        self._number = 0
        self._rounds = 0  # of all operations so far: FILLED and WORKED never go back
        self._steps: Steps | None = None
        self._idle = 0
        self._stage: Tensor | None = None
        self._refusal: BaseException | None = None

    @property
    def busy(self) -> bool:
        """There is something to do or to wait for."""
        return self._steps is not None

    def submit(self, work: Work) -> None:
        """Have `work` done, and its `done` called."""
        if self._refusal is not None:
            work.done(self._refusal)
            return
        if work.window.nbytes >= LARGE_BYTES or work.target.nbytes >= LARGE_BYTES:
            work.done = self._groups.progress.counted(work.done)
        self._queue.append(work)
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
        self._idle = 0 if moved else self._idle + 1
        if self._idle % _LOOK_PASSES == _LOOK_PASSES - 1 or not self._near.ordered:
            self._boards.look()
        return moved

    def give_up(self, error: BaseException) -> None:
        """Touch nobody's memory any more: what is left to do fails with `error`."""
        self._refusal = error
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while self._queue:
            self._queue.pop().done(error)

    # --- one operation after another -------------------------------------------------------------------------

    def _all(self) -> Steps:
        while self._queue:
            self._number += 1
            work = yield from self._agree()
            try:
                posts = [board.read() for board in self._boards.all]
                differ = len({post.facts for post in posts}) > 1
                if work.longest and not differ:
                    with writable(work.target):
                        yield from self._perform(work, posts)
                # Nobody goes on, and says something else, before all have seen what was said of this one.
                self._rounds += 1
                self._tell(WORKED, self._rounds)
                yield from self._wait(WORKED, self._rounds)
                if differ:
                    raise self._mismatch(posts)
            except AiodistError as error:
                failure: BaseException | None = error
            except Exception as error:  # noqa: BLE001  - it belongs to whoever awaits the operation
                # The others wait for a round that never ends: nothing can follow it.
                failure = self._refusal = BackendError(f"{work} failed: {error}")
                failure.__cause__ = error
            else:
                failure = None
            self._queue.remove(work)
            work.done(failure)
            if self._refusal is not None:
                self._fail(self._refusal)
            yield True

    def _agree(self) -> Generator[bool, None, Work]:
        """Return the next operation, once all ranks have posted their parts of it.

        The first rank says which it is, since the others may have begun operations of several steps in another
        order; they propose what they would take next, which nearly always is the same.
        """
        boards, number = self._boards, self._number
        while not boards.all and not boards.meet():
            yield False
        first = boards.all[0].words
        proposed: Work | None = None
        while True:
            chosen = self._queue[0] if self.rank == 0 else proposed or self._queue[0]
            if self.rank and first[NUMBER] == number and first[KEY] != chosen.key:
                chosen = next((work for work in self._queue if work.key == first[KEY]), chosen)
            if chosen is not proposed:
                proposed = chosen
                boards.mine.write(number, chosen.key, self._post(chosen))
                boards.ring()
            key = proposed.key
            for words in boards.others:
                if words[NUMBER] != number or words[KEY] != key:
                    break
            else:
                return proposed
            yield False

    def _post(self, work: Work) -> Post:
        shared = work.reads(self.rank) or work.writes(self.rank)
        if not shared or not work.longest:
            return Post(work.facts, None, None)
        window = self._near.locate(work.window)
        stage = None
        if window is None:
            if self._stage is None:
                self._stage = self._near.arena.empty((_STAGES * self._stage_bytes,), torch.uint8)
            stage = self._near.locate(self._stage)
        return Post(work.facts, window, stage)

    @property
    def _stage_bytes(self) -> int:
        return self.size * max(_STAGED_BYTES // self.size // _LEAST_PIECE, 1) * _LEAST_PIECE

    def _mismatch(self, posts: Sequence[Post]) -> MismatchError:
        sides = "; ".join(f"rank {rank}: {Work.described(post.facts)}" for rank, post in enumerate(posts))
        return MismatchError(f"ranks disagree on an operation in shared memory: {sides}")

    # --- rounds -----------------------------------------------------------------------------------------------

    def _perform(self, work: Work, posts: Sequence[Post]) -> Steps:
        staged = [post.stage is not None for post in posts]
        nbytes = self._stage_bytes // work.parts if any(staged) else _PIECE_BYTES
        rounds = _Rounds(work, nbytes // work.window.element_size(), staged)
        rounds.memory = [self._memory(work, rank, post) for rank, post in enumerate(posts)]
        base, self._rounds = self._rounds, self._rounds + rounds.count
        if any(staged):
            yield from self._staged(rounds, base)
        else:
            for j in range(rounds.count):
                rounds.work_on(j)
                if j + 1 < rounds.count:
                    yield True

    def _staged(self, rounds: _Rounds, base: int) -> Steps:
        work, me = rounds.work, self.rank
        fills = rounds.staged[me] and work.reads(me)
        drains = rounds.staged[me] and work.writes(me)
        readable = [i for i, staged in enumerate(rounds.staged) if staged and i != me and work.reads(i)]
        filled = 0
        for j in range(rounds.count):
            while fills and filled < min(j + _STAGES, rounds.count):
                # What was in that stage before has been worked on by everybody.
                yield from self._wait(WORKED, base + filled + 1 - _STAGES)
                rounds.fill(filled, self._stage)
                filled += 1
                self._tell(FILLED, base + filled)
                yield True
            for rank in readable:
                words = self._boards.all[rank].words
                while words[FILLED] < base + j + 1:
                    yield False
            rounds.work_on(j)
            if j + 1 < rounds.count or drains:
                self._tell(WORKED, base + j + 1)
            yield True
            if drains:
                yield from self._wait(WORKED, base + j + 1)
                rounds.drain(j, self._stage)
                yield True

    def _memory(self, work: Work, rank: int, post: Post) -> Tensor:
        """Return what is to be looked at of the memory of `rank`: its window, or its stage."""
        window = work.window
        if rank == self.rank:
            return window
        place = post.window or post.stage
        if place is None:  # nobody looks
            return window
        numel = work.window_numel(rank) if post.stage is None else _STAGES * self._stage_bytes // window.element_size()
        neighbour = self._near.neighbours[self._ranks[rank]]
        return neighbour.memory(place, numel * window.element_size()).view(window.dtype)

    def _tell(self, which: int, count: int) -> None:
        self._boards.mine.words[which] = count
        self._boards.ring()

    def _wait(self, which: int, count: int) -> Steps:
        for words in self._boards.others:
            while words[which] < count:
                yield False


class _Rounds:
    """One operation, cut into rounds."""

    def __init__(self, work: Work, piece: int, staged: Sequence[bool]) -> None:
        self.work = work
        self.staged = staged
        self.count = -(-work.longest // piece)
        self.memory: list[Tensor] = []
        """By rank: its window, or its stage."""
        self._piece = piece

    def work_on(self, j: int) -> None:
        self.work.step(self._at, j * self._piece, (j + 1) * self._piece)

    def fill(self, j: int, stage: Tensor | None) -> None:
        """Copy the pieces of round `j` that others look at into the stage."""
        for mine, staged in self._pieces(j, stage):
            staged.copy_(mine)

    def drain(self, j: int, stage: Tensor | None) -> None:
        """Copy them back."""
        for mine, staged in self._pieces(j, stage):
            mine.copy_(staged)

    def _pieces(self, j: int, stage: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        window, rank = self.work.window, self.work.rank
        assert stage is not None
        stage = stage.view(window.dtype)
        for part in self.work.lent():
            first, last = self._range(rank, part, j * self._piece, (j + 1) * self._piece)
            if last > first:
                at = self._in_stage(part, j)
                yield window[first:last], stage[at : at + last - first]

    def _at(self, rank: int, part: int, first: int, last: int) -> Tensor:
        j = first // self._piece
        first, last = self._range(rank, part, first, last)
        if self.staged[rank] and rank != self.work.rank:
            at = self._in_stage(part, j)
            return self.memory[rank][at : at + last - first]
        return self.memory[rank][first:last]

    def _range(self, rank: int, part: int, first: int, last: int) -> tuple[int, int]:
        start, stop = self.work.part(rank, part)
        return min(start + first, stop), min(start + last, stop)

    def _in_stage(self, part: int, j: int) -> int:
        return (j % _STAGES * self.work.parts + part) * self._piece

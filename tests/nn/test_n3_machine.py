"""N3: the machines of one pass on several ranks, in random walks with a model of the loop and the communicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiodist.errors import CommunicatorAborted, PeerLost
from aiodist.nn.pass_machine import (
    Abort,
    Action,
    Arrive,
    ExchangeAccounts,
    Fail,
    PassMachine,
    Phase,
    Send,
    Settle,
    Stage,
    SumHeader,
    SumStatus,
    Terms,
)
from aiodist.nn.pass_status import PassAccount, PassStatus, StatusKind

pytestmark = pytest.mark.timeout(300)

HEALTHY = ("plain", "asked", "join")
UNSOUND = ("other steps", "ask for different", "some ask", "join for different", "some join")
"""Passes that cannot count, since the odd ranks do something else than the even ones."""
ERRORS = (PeerLost("gone", lost=0), OSError("broken"))
MISHAPS = ("memory", "trouble", "data", "both", *[""] * 16)
PICKS = st.integers(0, 9)


T = TypeVar("T")


def chosen(things: list[T], pick: int) -> T:
    return things[pick % len(things)]


@dataclass
class Load:
    nbytes: int
    on_device: bool


class Wire:
    """A communicator: the n-th that one rank sends meets the n-th of every other rank."""

    def __init__(self, size: int) -> None:
        self.sent: list[list[Any]] = [[] for _ in range(size)]
        self.lost: Exception | None = None
        self._then: list[dict[int, Callable[[Exception | None, list[Any]], None]]] = [{} for _ in range(size)]

    def send(self, rank: int, payload: Any, then: Callable[[Exception | None, list[Any]], None]) -> None:
        """Call `then` with the payloads of all ranks, or with an error if the communicator is lost first."""
        if self.lost is not None:
            then(self.lost, [])
            return
        self._then[rank][len(self.sent[rank])] = then
        self.sent[rank].append(payload)

    def able(self) -> list[tuple[int, int]]:
        """Return which operations can end: rank, and number."""
        met = min(map(len, self.sent))
        return [(r, n) for r, then in enumerate(self._then) for n in then if n < met or self.lost is not None]

    def deliver(self, rank: int, n: int) -> None:
        """End an operation of a rank."""
        then = self._then[rank].pop(n)
        if all(len(sent) > n for sent in self.sent):
            then(None, [sent[n] for sent in self.sent])
        else:
            then(self.lost, [])


class Pass:
    """One pass on one rank, and the actions of its machine."""

    def __init__(self, rank: Rank, number: int, terms: Terms, *, waits: bool) -> None:
        self.machine = PassMachine(rank.walk.loads, terms, rank=rank.number, window=rank.walk.window, waits=waits)
        self.number = number
        self.refused = terms.refused is not None
        self.begun = self.phase is not Phase.WAITING
        self.sent: list[int] = []
        self.settled: list[int] = []
        self.arrived: list[int] = []
        self.answers = 0
        """Number of missing answers."""
        self.closed = False
        self.failure: BaseException | None = None
        self.ended = False
        self._on = rank
        self._events: deque[tuple[Callable[..., list[Action]], tuple[Any, ...]]] = deque()
        self._handles = False

    @property
    def phase(self) -> Phase:
        return self.machine.phase

    @property
    def stages(self) -> list[Stage]:
        return self.machine.stages

    @property
    def error(self) -> BaseException | None:
        return self.machine.error

    def state(self) -> dict[str, Any]:
        known = {**vars(self), **vars(self.machine)}
        return {name: value.copy() if isinstance(value, list | set) else value for name, value in known.items()}

    def handle(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Carry out what the machine returns for an event; events within that come after it."""
        self._events.append((event, args))
        if self._handles:
            return
        self._handles = True
        while self._events:
            event, args = self._events.popleft()
            self.handle_now(event, *args)
        self._handles = False

    def handle_now(self, event: Callable[..., list[Action]], *args: Any) -> None:
        """Handle an event within others, as `Pass` does with a bucket that cannot be sent."""
        for action in event(*args):
            self.carry_out(action)
        if self.phase is Phase.OVER and not self.ended:
            assert self.closed
            assert self.answers == 0
            self.ended = True

    def carry_out(self, action: Action) -> None:
        assert not self.ended
        match action:
            case Send(index):
                self.send(index)
            case SumHeader():
                self.exchange(self._on.packed(kind=StatusKind.JOIN), self.machine.header_summed)
            case SumStatus(issued, failed):
                assert self.closed
                steps = 6 if self._on.walk.kinds[self.number] == "other steps" and self._on.odd else 5
                self.exchange(self._on.packed(issued=issued, failed=failed, steps=steps), self.machine.summed)
            case ExchangeAccounts(failure):
                self.exchange(PassAccount(failure, (), self.number, ""), self.machine.explained)
            case Settle(index):
                assert self.stages[index] in (Stage.REDUCED, Stage.QUEUED)
                assert self._on.walk.loads[index].on_device or self.stages[index] is Stage.REDUCED
                self.settled.append(index)
            case Arrive(index):
                assert self.stages[index] is Stage.REDUCED
                self.arrived.append(index)
            case Fail(error):
                self.failure = self.failure or error
            case Abort(why, wholly):
                self._on.walk.lose(CommunicatorAborted(why), wholly=wholly)

    def send(self, index: int) -> None:
        """Queue a bucket for a permit."""
        assert self.begun
        assert self.phase in (Phase.BACKWARD, Phase.ENDING)
        assert index not in self.sent
        self.sent.append(index)
        self.answers += 1
        self._on.startable.append((self, index))
        if self._on.walk.eager:
            self._on.let()

    def exchange(self, payload: Any, event: Callable[[Any], list[Action]]) -> None:
        def answer(error: Exception | None, payloads: list[Any]) -> None:
            self.answers -= 1
            if error is not None:
                self.handle(self.machine.unanswered, error)
                return
            assert len({type(payload) for payload in payloads}) == 1  # no rank takes an account for a status
            self.handle(event, payloads if isinstance(payload, PassAccount) else self._on.unpacked(payloads))

        self.answers += 1
        self._on.walk.status.send(self._on.number, payload, answer)


class Rank:
    """One rank and its passes."""

    def __init__(self, walk: Walk, number: int) -> None:
        self.walk = walk
        self.number = number
        self.passes: list[Pass] = []
        self.startable: deque[tuple[Pass, int]] = deque()
        self.odd = number % 2 == 1
        self.asking = False
        self.trouble: Exception | None = None
        """The error that the next reduction raises when it is issued."""

    @property
    def newest(self) -> Pass | None:
        return self.passes[-1] if self.passes else None

    def may_start(self, kinds: list[str]) -> bool:
        newest = self.newest
        if newest is None or newest.ended:
            return not self.asking
        # A rank that asks the others before a pass waits for the end of the last pass.
        return newest.closed and not any(map(self.asks, kinds[len(self.passes) :][:1]))

    def asks(self, kind: str) -> bool:
        return kind in ("asked", "ask for different") or (self.odd and kind in ("some ask", "join for different"))

    def start(self, kind: str) -> None:
        """Begin a pass; ask the others first if its kind requires it."""
        if self.asks(kind):
            how = StatusKind.JOIN if kind == "join for different" else StatusKind.ASK
            self.asking = True
            self.walk.status.send(self.number, self.packed(kind=how, other=self.odd and kind != "asked"), self.asked)
        else:
            joins = kind in ("join", "join for different") or (self.odd and kind == "some join")
            self.make(Terms([1.0], header=True if joins else None, prompt=not joins))

    def packed(self, *, other: bool = False, steps: int = 5, **how: Any) -> torch.Tensor:
        return PassStatus.pack([float(not other)], len(self.walk.ranks), self.number, steps=steps, **how)

    def unpacked(self, payloads: list[Any]) -> PassStatus:
        return PassStatus.unpack(torch.stack(payloads).sum(0), len(self.walk.ranks))

    def asked(self, error: Exception | None, payloads: list[Any]) -> None:
        self.asking = False
        verdict = None if error is not None else self.unpacked(payloads)
        accepted = verdict is None or (
            (verdict.all_are(StatusKind.ASK) or verdict.all_are(StatusKind.JOIN)) and verdict.wanted() is not None
        )
        self.make(Terms([1.0], refused=None if accepted else verdict))

    def make(self, terms: Terms) -> None:
        waits = self.newest is not None and not self.newest.ended
        self.passes.append(Pass(self, len(self.passes), terms, waits=waits))

    def waiting(self) -> list[Pass]:
        """Return the passes that have not begun, though the pass before has ended."""
        befores = [None, *self.passes]
        pairs = zip(befores, self.passes, strict=False)
        return [this for before, this in pairs if not this.begun and (before is None or before.ended)]

    def begin(self, this: Pass) -> None:
        this.begun = True
        this.handle(this.machine.begin)

    def close(self, this: Pass, error: Exception | None) -> None:
        this.closed = True
        unsendable = error if isinstance(error, MemoryError) else None
        this.handle(
            this.machine.backward_ended, error, None if error is None else f"Traceback\n{error!r}\n", unsendable
        )

    def let(self) -> bool:
        """Give leave to the first bucket that waits for it."""
        if not self.startable:
            return False
        this, index = self.startable.popleft()
        error, self.trouble = self.walk.data.lost or self.trouble, None
        if error is not None:
            this.answers -= 1
            this.handle_now(this.machine.unsent, index, error)
            return True

        def come(error: Exception | None, payloads: list[Any]) -> None:
            this.answers -= 1
            assert len(set(payloads)) < 2  # all ranks send the same buckets in the same order
            if error is None:
                this.handle(this.machine.reduced, index)
            else:
                this.handle(this.machine.failed, index, error)

        self.walk.data.send(self.number, (this.number, index), come)
        if self.walk.loads[index].on_device:
            this.handle(this.machine.queued, index)
        return True


class Walk(RuleBasedStateMachine):
    """Ranks go through the same passes, each at its own pace, and lose memory, messages and one another."""

    calm = True

    @initialize(
        size=st.integers(1, 3),
        loads=st.lists(st.builds(Load, st.integers(1, 5), st.booleans()), min_size=1, max_size=5),
        window=st.none() | st.integers(1, 12),
        eager=st.booleans(),
        calm=st.booleans(),
    )
    def set_up(self, size: int, loads: list[Load], window: int | None, eager: bool, calm: bool) -> None:
        """With `eager`, permits are granted immediately; with a `window`, the order may change when backward ends."""
        self.loads, self.window, self.eager, self.calm = loads, window, eager, calm
        self.kinds: list[str] = []
        self.whole = True
        """No communicator was lost."""
        self.data, self.status = Wire(size), Wire(size)
        self.ranks = [Rank(self, number) for number in range(size)]
        self.failed: set[tuple[int, int]] = set()
        """The passes in which backward raised, and the ranks."""

    def startable(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.may_start(self.kinds)]

    @precondition(lambda self: self.startable())
    @rule(pick=PICKS, kind=st.sampled_from([*HEALTHY, *HEALTHY, *UNSOUND]))
    def start(self, pick: int, kind: str) -> None:
        """The first rank that starts a pass chooses its kind."""
        rank = chosen(self.startable(), pick)
        if len(self.kinds) == len(rank.passes):
            early = rank.newest is not None and not rank.newest.ended
            self.kinds.append("plain" if (self.calm and kind in UNSOUND) or (early and rank.asks(kind)) else kind)
        rank.start(self.kinds[len(rank.passes)])

    def waiting(self) -> list[tuple[Rank, Pass]]:
        return [(rank, this) for rank in self.ranks for this in rank.waiting()]

    @precondition(lambda self: self.waiting())
    @rule(pick=PICKS)
    def begin(self, pick: int) -> None:
        rank, this = chosen(self.waiting(), pick)
        rank.begin(this)

    def backward(self) -> list[tuple[Rank, Pass]]:
        return [(rank, rank.newest) for rank in self.ranks if rank.newest is not None and not rank.newest.closed]

    @precondition(lambda self: self.backward())
    @rule(pick=PICKS, number=PICKS)
    def fill(self, pick: int, number: int) -> None:
        """The last gradient of a bucket comes; there is no backward in a pass that is refused."""
        _, this = chosen(self.backward(), pick)
        filling = [i for i, stage in enumerate(this.stages) if stage is Stage.FILLING and not this.refused]
        if filling:
            this.handle(this.machine.filled, chosen(filling, number))

    @precondition(lambda self: self.backward())
    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        """Backward ends; what is not full by then is of parameters that were not used."""
        rank, this = chosen(self.backward(), pick)
        rank.close(this, None)

    @precondition(lambda self: self.data.able())
    @rule(pick=PICKS)
    def reduced(self, pick: int) -> None:
        self.data.deliver(*chosen(self.data.able(), pick))

    @precondition(lambda self: self.status.able())
    @rule(pick=PICKS)
    def told(self, pick: int) -> None:
        self.status.deliver(*chosen(self.status.able(), pick))

    def asking_leave(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.startable]

    @precondition(lambda self: self.asking_leave())
    @rule(pick=PICKS)
    def grant(self, pick: int) -> None:
        chosen(self.asking_leave(), pick).let()

    @precondition(lambda self: not self.calm and self.backward())
    @rule(pick=PICKS)
    def raise_in_backward(self, pick: int) -> None:
        rank, this = chosen(self.backward(), pick)
        self.failed.add((this.number, rank.number))
        rank.close(this, ValueError("raised"))

    @precondition(lambda self: not self.calm)
    @rule(
        pick=PICKS,
        what=st.sampled_from(["memory", "trouble", "data", "both", *[""] * 16]),
        error=st.sampled_from(ERRORS),
    )
    def go_wrong(self, pick: int, what: str, error: Exception) -> None:
        """Rarely, memory for zeros runs out, a reduction cannot be issued, or a communicator is lost."""
        self.whole = self.whole and not what
        if what == "memory":
            for rank, this in self.backward()[:1]:
                rank.close(this, MemoryError("none"))
        elif what == "trouble":
            chosen(self.ranks, pick).trouble = RuntimeError("in trouble")
        elif what:
            self.lose(error, wholly=what == "both")

    def lose(self, error: Exception, *, wholly: bool) -> None:
        for wire in (self.data, self.status)[: 1 + wholly]:
            wire.lost = wire.lost or error

    @invariant()
    def all_send_the_same(self) -> None:
        for sent in zip_longest(*self.data.sent):
            assert len({bucket for bucket in sent if bucket is not None}) == 1

    @invariant()
    def no_more_is_in_flight_than_may_be(self) -> None:
        for this in (this for rank in self.ranks for this in rank.passes):
            moving = [i for i in this.sent if this.stages[i] in (Stage.MOVING, Stage.QUEUED)]
            if self.window is not None and len(moving) > 2:
                assert sum(self.loads[i].nbytes for i in moving) <= self.window
            assert this.begun or not this.sent

    @invariant()
    def a_bucket_that_is_full_already_changes_nothing(self) -> None:
        for this in (this for rank in self.ranks for this in rank.passes):
            before = this.state()
            for index, stage in enumerate(this.stages):
                if stage is not Stage.FILLING:
                    this.handle(this.machine.filled, index)
            assert this.state() == before

    def teardown(self) -> None:
        """Bring all ranks to the end of the same pass, also where something was lost: nothing may be left."""
        while self.go_on():
            pass
        for rank in self.ranks:
            assert len(rank.passes) == len(self.kinds)
            assert not rank.startable
            assert all(this.ended and this.phase is Phase.OVER for this in rank.passes)
        for number in range(len(self.kinds) if self.whole else 0):
            self.check_whole(number)

    def go_on(self) -> bool:
        """Do one thing that is left, if there is one."""
        for rank, this in self.backward()[:1] or self.waiting()[:1]:
            rank.begin(this) if this.closed else rank.close(this, None)
            return True
        for rank in self.asking_leave():
            return rank.let()
        for wire in (self.data, self.status):
            for operation in wire.able():
                wire.deliver(*operation)
                return True
        for rank in self.startable():
            if len(rank.passes) < len(self.kinds):
                rank.start(self.kinds[len(rank.passes)])
                return True
        return False

    def check_whole(self, number: int) -> None:
        """Every bucket was reduced once, and either all ranks have made the pass, or none has."""
        alone = len(self.ranks) == 1
        if not alone and "some join" in self.kinds[: number + 1]:
            return  # such a pass makes the ranks abort
        fails = any(failed == number for failed, _ in self.failed) or (not alone and self.kinds[number] in UNSOUND)
        everything = list(range(len(self.loads)))
        for rank in self.ranks:
            this = rank.passes[number]
            assert sorted(this.sent) == everything
            assert (type(this.error) is ValueError) == ((number, rank.number) in self.failed)
            assert (this.error is not None) == (this.failure is not None) == fails
            assert sorted(this.settled) == sorted(this.arrived if this.settled else []) == ([] if fails else everything)


TestWalk = Walk.TestCase
TestWalk.settings = settings(stateful_step_count=60)

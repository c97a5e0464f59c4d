"""One block of a tensor on a server: the requests that have come, the orders of its leader, and its memory.

The server that leads a tensor asks the machine of its consistency what to do with each request, and sends the orders
to the servers that follow. Every shard carries them out one after another, each as soon as the requests that it names
have come. So all shards go through the same versions, and a read stands between the same two of them everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.backends.base import DTYPES
from aiodist.ps import machines
from aiodist.ps.answers import Answers, Change, Pulling, Pushing, Request, Restored
from aiodist.ps.context import LIGHT_BYTES, Context, error_of
from aiodist.ps.machines import Apply, Drop, Machine, Serve
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.readers import Reader, Readers
from aiodist.ps.rules import RULES, Function, Piece, Rule, apply_step
from aiodist.ps.settings import Span
from aiodist.ps.wire import Kind, Order, OrderKind, Reads, Stage


class Shard:
    """What one server has of one tensor; every method runs with the transport lock held."""

    def __init__(
        self, context: Context, answers: Answers, turned: Callable[[Shard, Order], None], call: dict[str, Any]
    ) -> None:
        """`call` asks to make it. `turned` is told of the turn of a checkpoint."""
        self._context = context
        self._answers = answers
        self._turned = turned
        self.key: int = call["key"]
        self.name: str = call["name"]
        dtype = DTYPES[call["dtype"]]
        self.data = context.pool.take(call["numel"] * dtype.itemsize).view(dtype)
        """Its memory, flat."""
        self.pushed_dtype = dtype
        """Of what is pushed, unless that is a code."""
        self.replaces: bool = call["codec"]
        """It is the code of an object, which a push replaces whole."""
        self._rule = context.rules[call["rule"]]
        """That of the tensor, which a push may replace by another."""
        self.shape = tuple(call["shape"])
        self.spans = [Span(*span) for span in call["spans"]]
        """Of all of its servers."""
        self._servers = [span.rank for span in self.spans]
        self.number = self._servers.index(context.rank)
        """Of this server among them."""
        self.start = self.spans[self.number].start
        self.machine: Machine | None = None if self.number else context.policy.machine(context.workers)
        """That of the leader, which is the first server."""
        self._followers = [] if self.number else self._servers[1:]
        self.refusal: Exception | None = None
        """The tensor was freed; or another block of it is lost, so nobody orders what happens to this one."""
        self.version = 0
        self.marks: dict[int, int] = {}
        """Of each client the number of its last push that was applied, or failed."""
        self._states: dict[int, Any] = {}
        self._arrived: dict[Reader, tuple[Request, float]] = {}
        self._orders: deque[Order] = deque()
        self.readers = Readers(context)
        self._waiting: list[Pulling] = []
        """Reads `AFTER_OWN` of clients whose own pushes are not applied yet."""
        self._applying: Sequence[Pushing] = ()
        self._left = False
        """The memory was left to readers: what changes it takes other memory first."""
        self.unseen: Callable[[], object] = lambda: None
        """Called when nobody looks at the memory any more."""
        self._lent = False
        """A checkpoint is written from the memory: what changes it takes other memory first."""
        self._borrowed: Tensor | None = None
        """The memory that a checkpoint is written from."""
        self._busy = False
        self._advancing = False
        # What is applied when it comes, here alone and in no time, needs no order.
        self._quick = not self._followers and self.data.nbytes <= LIGHT_BYTES and not self.replaces

    # --- what comes ----------------------------------------------------------------------------------------

    def obey(self, order: Order) -> None:
        if self.refusal is None:
            self._orders.append(order)
            self.advance()

    def release(self, client: int, number: int) -> None:
        if (memory := self.readers.release((client, number))) is not None:
            self._recycle(memory)
        self._seen()

    def leave(self, client: int, *, gone: bool) -> None:
        if gone:
            self.readers.leave(client)
            if client in self._servers and self.refusal is None:
                self._orders.clear()
                self.refuse(self._context.lost(client))
        if (machine := self._clock_of(client)) is not None:
            self._order(machine.leave(client))
        self._seen()

    def _seen(self) -> None:
        """Go on where a reader may look no more."""
        self.advance()
        if not self.readers:
            self.unseen()

    def rest(self, client: int) -> None:
        if (machine := self._clock_of(client)) is not None:
            self._order(machine.rest(client))
            self.advance()

    def _clock_of(self, client: int) -> Machine | None:
        return self.machine if client in self._context.workers and self.refusal is None else None

    def owes(self, clients: Container[int]) -> bool:
        """Return whether something is being applied, or a push or change of theirs that has come is not yet."""
        held = [key for key, (request, _) in self._arrived.items() if not isinstance(request, Pulling)]
        return self._busy or any(client in clients for client, _ in held)

    def resume(self, clients: Iterable[int]) -> None:
        if self.machine is not None:
            self.machine.resume(clients)

    def refuse(self, error: Exception) -> None:
        """Carry out no more than what was ordered; refuse the rest, and what comes."""
        self.refusal = error
        ordered = {(client, number) for order in self._orders for client, number, _ in order.parts}
        for key in [key for key in self._arrived if key not in ordered]:
            request, _ = self._arrived.pop(key)
            self._answers.refuse(request, error)
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            self._answers.refuse(read, error)
        self._answers.applied()

    def deliver(self, request: Request) -> None:
        """Execute a request, all of which has come, in its turn; those of a client come in the order of its calls."""
        if self.refusal is not None:
            self._answers.refuse(request, self.refusal)
            return
        if isinstance(request, Pushing) and self._context.policy.accepts:
            self._answers.done(request, Stage.ACCEPTED)
        elif isinstance(request, Pulling) and request.reads != Reads.SNAPSHOT:
            if request.reads == Reads.AFTER_OWN and self._holds_push(request.client):
                self._waiting.append(request)
            else:
                self._serve(request)
            return
        if self.machine is not None:
            self._decide(self.machine, request)
        else:
            self._arrived[(request.client, request.number)] = (request, perf_counter())
            self.advance()

    def _serve_waiting(self) -> None:
        """Serve the lock-free reads whose clients have no push here that is still to be applied."""
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            if self._holds_push(read.client):
                self._waiting.append(read)
            else:
                self._serve(read)

    def _holds_push(self, client: int) -> bool:
        """Return True while a push of `client` is still to be applied, unless it was copied when it was accepted."""
        if self._context.policy.accepts:
            return False
        held = any(key[0] == client and isinstance(each, Pushing) for key, (each, _) in self._arrived.items())
        return held or any(push.client == client for push in self._applying)

    def fill(self, request: Pushing) -> None:
        assert request.value is not None
        self._take_other_memory()
        self.data.copy_(request.value)
        self._answers.recycle(request)
        self._answers.done(request, Stage.APPLIED)

    def _serve(self, request: Pulling) -> None:
        self._answers.serve(self, request, self.version)

    # --- the leader ------------------------------------------------------------------------------------------

    def _decide(self, machine: Machine, request: Request) -> None:
        """Ask the machine what to do about a request, and do it now or in its turn."""
        client, number = request.client, request.number
        actions: Sequence[machines.Action] = ()
        try:
            if isinstance(request, Pushing):
                actions = machine.push(machines.Push(client, number, request.base))
            elif isinstance(request, Pulling):
                actions = machine.pull(machines.Pull(client, number, request.wants))
        except ValueError as error:
            self._answers.refuse(request, error)
            # Those who follow have it too, and would keep it for ever.
            self._tell(Order(self.key, OrderKind.DROP, self.version, ((client, number, 1.0),)))
            return
        waits = self._orders or self._busy or self._arrived
        if self._quick and len(actions) == 1 and not waits and self._done_at_once(request, actions[0]):
            return
        self._arrived[(client, number)] = (request, perf_counter())
        if isinstance(request, Pushing) and not actions and not self._context.policy.accepts:
            self._answers.done(request, Stage.ACCEPTED)  # it is held
        if isinstance(request, Change):
            self._send(Order(self.key, OrderKind.DO, machine.version, ((client, number, 1.0),)))
        self._order(actions)
        self.advance()

    def _done_at_once(self, request: Request, action: machines.Action) -> bool:
        """Do what orders would have done with a request for which nothing waits; False if it takes an order."""
        if isinstance(action, Serve) and isinstance(request, Pulling):
            self._serve(request)
            return True
        if not isinstance(action, Apply) or not isinstance(request, Pushing):
            return False
        if len(action.parts) > 1 or self.readers.snapshots:
            return False
        pushes = [(request, action.parts[0].weight)]
        if not self._is_light(pushes):
            return False
        self._finished(action.version, (request,), error_of(partial(self._compute, pushes)))
        return True

    def _order(self, actions: Sequence[machines.Action]) -> None:
        assert self.machine is not None
        for action in actions:
            match action:
                case Apply(version, parts):
                    self._send(Order(self.key, OrderKind.APPLY, version, parts))
                case Serve(client, number, version):
                    self._send(Order(self.key, OrderKind.SERVE, version, ((client, number, 1.0),)))
                case Drop(worker, number):
                    self._send(Order(self.key, OrderKind.DROP, self.machine.version, ((worker, number, 1.0),)))

    def _send(self, order: Order) -> None:
        self._orders.append(order)
        self._tell(order)

    def _tell(self, order: Order) -> None:
        for rank in self._followers:
            self._context.coalescer.put(rank, Kind.ORDER, order.pack())

    # --- carrying out ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        if self._advancing:  # a reply to this very rank is heard at once
            return
        self._advancing = True
        try:
            while self._orders and not self._busy:
                order = self._orders[0]
                if order.kind in (OrderKind.SAVE, OrderKind.LOAD):
                    if order.kind == OrderKind.LOAD and (self.readers.snapshots or self.readers.lookers):
                        return
                    self._orders.popleft()
                    self._turned(self, order)
                    continue
                if order.kind == OrderKind.APPLY and self.readers.snapshots and not self._leave_to_readers():
                    return
                requests = self._gather(order)
                if requests is None:
                    return
                self._orders.popleft()
                self._carry_out(order, requests)
        finally:
            self._advancing = False
            self._serve_waiting()
            self._answers.applied()

    def _gather(self, order: Order) -> list[tuple[Request, float]] | None:
        """Return the requests that `order` names, each with its weight; None while one is still to come."""
        found: list[tuple[Request, float]] = []
        for client, number, weight in order.parts:
            entry = self._arrived.get((client, number))
            if entry is not None:
                found.append((entry[0], weight))
            elif client not in self._context.gone:
                return None
        now = perf_counter()
        for client, number, _ in order.parts:
            entry = self._arrived.pop((client, number), None)
            if entry is not None:
                self._context.counts["held_seconds"] += now - entry[1]
        return found

    def _carry_out(self, order: Order, requests: list[tuple[Request, float]]) -> None:
        if order.kind == OrderKind.APPLY:
            self._apply(order, [(r, w) for r, w in requests if isinstance(r, Pushing)])
            return
        for request, _ in requests:
            if isinstance(request, Pushing):
                self._answers.recycle(request)
                self._answers.done(request, Stage.DROPPED)
            elif isinstance(request, Pulling):
                self._serve(request)
            elif isinstance(request, Change):
                self._change(request)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def turn(self, kind: OrderKind, number: int, version: int) -> None:
        """Have all shards of the tensor come to the turn of that number between the same two steps, at that version."""
        if self.machine is not None and self.refusal is None:
            self.machine.restart(version, {})
            self._send(Order(self.key, kind, number, ()))
            self.advance()

    def work(self, work: Callable[[], object], over: Callable[[BaseException | None], None]) -> None:
        """Do `work` on the memory, while nothing changes it."""

        def done(error: BaseException | None) -> None:
            self._busy = False
            over(error)
            self.advance()

        self._busy = True
        self._context.service.do(self.data.nbytes, work, done)

    def state_of(self, rule: Rule) -> Any:  # noqa: ANN401
        return self._states.get(id(rule))

    def lend(self) -> Callable[[], None] | None:
        """Have the memory, and that of states, stay as it is until what is returned is called; from any thread.

        None where that cannot be: there are states that only their rules can copy, or an object.
        """
        if self.replaces or not self._can_move:
            return None
        self._lent, lent = True, self.data
        self._borrowed = lent

        def release_lent() -> None:
            self._lent, self._borrowed = False, None
            if self.data is not lent and not self.readers:
                self._context.pool.release(lent.view(torch.uint8))

        return release_lent

    @property
    def _can_move(self) -> bool:
        """There are no states that only their rules can copy."""
        rules = (rule for rule in self._context.rules if self.state_of(rule) is not None)
        return all(isinstance(rule, OptimizerRule) for rule in rules)

    def copied(self, context: Context) -> Restored:
        """Return copies of what it has, in memory of `context`, which may be that of another communicator."""
        data = context.pool.take(self.data.nbytes).view(self.data.dtype)
        data.copy_(self.data)
        restored = Restored(self.version, data)
        for number, rule in enumerate(context.rules):
            if (state := self.state_of(rule)) is not None:
                restored.states[number] = made = rule.state(data)
                rule.load_state_dict(made, rule.state_dict(state))
        return restored

    def _take_other_memory(self) -> None:
        """Move to other memory, before a change, if a checkpoint is written from this or readers keep it."""
        if self._lent:
            self._move_to(self.copied(self._context))
        elif self._left:
            data = self._context.pool.take(self.data.nbytes).view(self.data.dtype)
            data.copy_(self.data)
            self.data, self._left = data, False
            for rule in self._context.rules:
                if isinstance(rule, OptimizerRule) and (state := self.state_of(rule)) is not None:
                    rule.move(state, data)

    def _move_to(self, restored: Restored) -> None:
        self.data, self._lent, self._left = restored.data, False, False
        self._states = {id(self._context.rules[number]): state for number, state in restored.states.items()}

    def take(self, restored: Restored) -> None:
        if not (self._lent or self._left):
            self._context.pool.release(self.data.view(torch.uint8))
        self._move_to(restored)
        self._restart(restored)

    def _restart(self, restored: Restored) -> None:
        self.version = max(self.version, restored.version)
        for client, uid in enumerate(self._context.uids):
            self.marks[client] = max(self.marks.get(client, 0), restored.marks.get(uid, 0))
        if self.machine is not None:
            self.machine.restart(restored.version, self.marks)

    # --- reads -------------------------------------------------------------------------------------------------

    def hold(self, request: Pulling) -> None:
        """Keep the memory until `release`, since somebody looks at it; as it is, unless the read is lock-free."""
        self.readers.hold((request.client, request.number), self.data, snapshot=request.reads == Reads.SNAPSHOT)

    def _leave_to_readers(self) -> bool:
        """Leave the memory to its readers once they have taken long; return False while a step waits for them."""
        if not self._can_move or not self.readers.leave_to(self.data, self.advance):
            return False
        self._left = not self.replaces
        return True

    def _recycle(self, memory: Tensor) -> None:
        """Return memory that was left to a reader to the pool, if no other reader has it."""
        if not (self.replaces or memory is self.data or memory is self._borrowed or self.readers.see(memory)):
            self._context.pool.release(memory.view(torch.uint8))

    def _change(self, request: Change) -> None:
        if (error := error_of(partial(self._configure, request.settings))) is not None:
            self._answers.refuse(request, error)
        else:
            self._answers.answer(request.client, request.number)

    def _configure(self, settings: dict[str, float]) -> None:
        self._rule.configure(self._state(self._rule), **settings)

    # --- applying ----------------------------------------------------------------------------------------------

    def _apply(self, order: Order, pushes: list[tuple[Pushing, float]]) -> None:
        self.readers.stepped()

        def over(error: BaseException | None) -> None:
            was_busy, self._busy, self._applying = self._busy, False, ()
            self._finished(order.version, [push for push, _ in pushes], error)
            if was_busy:
                self.advance()

        if self._can_swap(pushes):
            push = pushes[0][0]
            assert push.value is not None
            kept = self._lent or self._left
            self.data, push.buffer = push.value, None if kept else self.data.view(torch.uint8)
            self._lent = self._left = False
            over(None)
            return
        work = partial(self._compute, pushes)
        if self.replaces:
            if pushes and pushes[-1][0].value is not None:
                self.data = pushes[-1][0].value.clone()
            over(None)
        elif self._is_light(pushes):
            over(error_of(work))
        else:
            self._busy, self._applying = True, [push for push, _ in pushes]
            self._context.service.run(work, over)

    def _is_light(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        if len(pushes) * self.data.nbytes > LIGHT_BYTES:
            return False
        return not any(isinstance(self._context.rules[push.rule], Function) for push, _ in pushes)

    def _compute(self, pushes: Sequence[tuple[Pushing, float]]) -> None:
        if not pushes:  # all of them died on the way
            return
        self._take_other_memory()
        rules = self._context.rules
        pieces = []
        for push, weight in pushes:
            assert push.value is not None
            decoded = self._context.decoded if push.coded else None
            value = push.value if decoded is None else decoded(push.value, self.data.dtype, self.data.numel())
            pieces.append(Piece(rules[push.rule], value, push.alpha, weight))
        began = perf_counter()
        apply_step(self.data, pieces, self._state)
        self._context.counts["step_seconds"] += perf_counter() - began

    def _state(self, rule: Rule) -> Any:  # noqa: ANN401
        if id(rule) not in self._states:
            self._states[id(rule)] = rule.state(self.data)
        return self._states[id(rule)]

    def _finished(self, version: int, pushes: Sequence[Pushing], error: BaseException | None) -> None:
        self.version = version
        counts = self._context.counts
        counts["applied"] += len(pushes) if error is None else 0
        counts["steps"] += 1
        for push in pushes:
            self.marks[push.client] = push.number
            self._answers.recycle(push)
            if error is None:
                self._answers.done(push, Stage.APPLIED)
            else:
                self._answers.refuse(push, error)

    def _can_swap(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        """Return True when what was pushed can become the shard's memory itself."""
        if len(pushes) != 1 or self.readers.lookers or any(state is not None for state in self._states.values()):
            return False
        push, weight = pushes[0]
        copies = self._context.rules[push.rule] is RULES["copy"] and weight == push.alpha == 1
        return copies and not self.replaces and push.buffer is not None and not push.coded


class Shards(dict[int, Shard]):
    """All shards of one server, by key."""

    def led(self) -> list[Shard]:
        return [shard for shard in self.values() if shard.machine is not None]

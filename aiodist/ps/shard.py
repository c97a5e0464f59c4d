"""A server's shard of one tensor: the requests that have arrived, and the orders of the leader.

The leading shard asks the machine of the consistency policy about each request, and sends the orders to the shards that
follow. Every shard carries out the orders one after another, each after the arrival of its requests. So all shards go
through the same versions, and a snapshot is between the same two versions everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from aiodist.ps.answers import Answers, Change, Pulling, Pushing, Request, Restored
from aiodist.ps.block import Block, BlockMemory
from aiodist.ps.context import Context
from aiodist.ps.leader import Action, Leader
from aiodist.ps.machines import Apply, Serve
from aiodist.ps.readers import Reader
from aiodist.ps.rules import Function, Piece, apply_step
from aiodist.ps.service import LIGHT_BYTES, error_of
from aiodist.ps.wire import Order, OrderKind, Reads, Stage


class Shard(Block):
    """The block of one server, as requests and orders change it (transport lock held)."""

    def __init__(
        self, context: Context, answers: Answers, turned: Callable[[Shard, Order], None], call: dict[str, Any]
    ) -> None:
        """`call` describes the block. `turned` is called at the order of a save or a load."""
        super().__init__(context, call)
        self._context = context
        self._answers = answers
        self._turned = turned
        self.memory = BlockMemory(context, self)
        self.readers = self.memory.readers
        self.leader = None if self.number else Leader(context, self)
        """The leader of the tensor, on its first server."""
        self.refusal: Exception | None = None
        """Error of all requests: the tensor was freed, or another block is lost, so no leader orders."""
        self.version = 0
        self.marks: dict[int, int] = {}
        """Number of the last push that was applied, or failed, by client."""
        self._arrived: dict[Reader, tuple[Request, float]] = {}
        """Requests that wait for their orders, with the times of their arrival."""
        self._orders: deque[Order] = deque()
        self._waiting: list[Pulling] = []
        """Reads `AFTER_OWN` of clients with a push that is not applied."""
        self._applying: Sequence[Pushing] = ()
        """Pushes that the service thread applies."""
        self.unseen: Callable[[], object] = lambda: None
        """Callback for the end of the last read."""
        self._busy = False
        """True while the service thread uses the memory."""
        self._advancing = False
        self._quick = len(self.spans) == 1 and self.memory.data.nbytes <= LIGHT_BYTES and not self.replaces
        """True if a request that waits for nothing needs no order."""

    # --- requests ------------------------------------------------------------------------------------------------

    def deliver(self, request: Request) -> None:
        """Take the next request of a client, in the order of its calls, after the arrival of all data."""
        if self.refusal is not None:
            self._answers.refuse(request, self.refusal)
            return
        if isinstance(request, Pushing):
            if self._context.policy.accepts:
                self._answers.done(request, Stage.ACCEPTED)
            elif self._quick and self._apply_now(request):
                return
        elif isinstance(request, Pulling) and request.reads != Reads.SNAPSHOT:
            self._serve_lock_free(request)
            return
        client, number = request.client, request.number
        if self.leader is None:
            self._arrived[(client, number)] = (request, perf_counter())
            self.advance()
            return
        try:
            actions = self.leader.decide(request)
        except ValueError as error:
            self._answers.refuse(request, error)
            # The followers have the request too, and would keep it forever.
            self.leader.order(OrderKind.DROP, self.version, ((client, number, 1.0),))
            return
        if self._do_now(request, actions):
            return
        self._arrived[(client, number)] = (request, perf_counter())
        if isinstance(request, Pushing) and not actions and not self._context.policy.accepts:
            self._answers.done(request, Stage.ACCEPTED)  # the machine holds the push
        self._orders += self.leader.orders(actions)
        self.advance()

    def fill(self, request: Pushing) -> None:
        """Take the first values."""
        assert request.value is not None
        self.memory.make_private()
        self.memory.data.copy_(request.value)
        self._answers.recycle(request)
        self._answers.done(request, Stage.APPLIED)

    def release(self, client: int, number: int) -> None:
        """End a read of the memory."""
        self.memory.release((client, number))
        self._seen()

    def _seen(self) -> None:
        self.advance()
        if not self.readers:
            self.unseen()

    def leave(self, client: int, *, gone: bool) -> None:
        """Take a client off the clock: it sends nothing more, or is `gone`."""
        if gone:
            self.readers.leave(client)
            if client in self.servers and self.refusal is None:
                self._orders.clear()
                self.refuse(self._context.lost(client))
        if self._has_clock(client):
            assert self.leader is not None
            self._orders += self.leader.orders(self.leader.machine.leave(client))
        self._seen()

    def rest(self, client: int) -> None:
        """Take a client that waits at a barrier off the clock."""
        if self._has_clock(client):
            assert self.leader is not None
            self._orders += self.leader.orders(self.leader.machine.rest(client))
            self.advance()

    def _has_clock(self, client: int) -> bool:
        return self.leader is not None and client in self._context.workers and self.refusal is None

    def owes(self, clients: Container[int]) -> bool:
        """Return True while a step is computed, or a push or change of `clients` has arrived and is not applied."""
        held = [key for key, (request, _) in self._arrived.items() if not isinstance(request, Pulling)]
        return self._busy or any(client in clients for client, _ in held)

    def late(self) -> dict[int, str]:
        """Return the server whose orders requests wait for here, with the tensor (any thread)."""
        waits = self._arrived and self.leader is None
        return {self.servers[0]: f"order for {self.name!r}"} if waits else {}

    def refuse(self, error: Exception) -> None:
        """Carry out the orders so far, and refuse all other requests."""
        self.refusal = error
        ordered = {(client, number) for order in self._orders for client, number, _ in order.parts}
        refused = [self._arrived.pop(key)[0] for key in list(self._arrived) if key not in ordered]
        waiting, self._waiting = self._waiting, []
        for request in (*refused, *waiting):
            self._answers.refuse(request, error)
        self._answers.applied()

    # --- reads ---------------------------------------------------------------------------------------------------

    def _serve(self, request: Pulling) -> None:
        self._answers.serve(self, request, self.version, self.memory.data)

    def _serve_lock_free(self, request: Pulling) -> None:
        """Serve a read that takes no order, perhaps after its client's own pushes."""
        if request.reads == Reads.AFTER_OWN and self._holds_push(request.client):
            self._waiting.append(request)
        else:
            self._serve(request)

    def hold(self, request: Pulling) -> None:
        """Keep the memory until `release`."""
        self.memory.hold(request)

    def _serve_waiting(self) -> None:
        """Serve the reads `AFTER_OWN` whose clients have no push here that is not applied."""
        waiting, self._waiting = self._waiting, []
        for read in waiting:
            self._serve_lock_free(read)

    def _holds_push(self, client: int) -> bool:
        """Return True if a push of `client` is not applied, and was not copied when it was accepted."""
        if self._context.policy.accepts:
            return False
        held = any(key[0] == client and isinstance(each, Pushing) for key, (each, _) in self._arrived.items())
        return held or any(push.client == client for push in self._applying)

    # --- orders ------------------------------------------------------------------------------------------------------

    @property
    def _waits(self) -> bool:
        """True if a request or an order waits, or a step is computed."""
        return bool(self._orders or self._busy or self._arrived)

    def _apply_now(self, push: Pushing) -> bool:
        """Apply a push that waits for nothing. Return False, with nothing changed, if `deliver` must continue.

        This does in one call what the leader and `_do_now` do for the most frequent request.
        """
        rule, memory, leader = self._context.rules[push.rule], self.memory, self.leader
        if self._waits or self.readers.snapshots or memory.uses:
            return False
        if push.coded or push.value is None or isinstance(rule, Function):
            return False
        if leader is None or not leader.machine.step(push.client, push.number, push.base):
            return False
        failure = None
        began = perf_counter()
        try:
            rule.apply(memory.data, push.value, push.alpha, memory.state(rule))
        except Exception as error:  # noqa: BLE001  - the client gets the error
            failure = error
        self._context.counts["step_seconds"] += perf_counter() - began
        self._finished(leader.machine.version, (push,), failure)
        return True

    def _do_now(self, request: Request, actions: Sequence[Action]) -> bool:
        """Carry out an action for which nothing waits. Return False if it takes an order."""
        if not self._quick or len(actions) != 1 or self._waits:
            return False
        action = actions[0]
        if isinstance(request, Pulling) and isinstance(action, Serve):
            self._serve(request)
            return True
        if not isinstance(request, Pushing) or not isinstance(action, Apply) or len(action.parts) > 1:
            return False
        pushes = [(request, action.parts[0].weight)]
        if self.readers.snapshots or not self._is_light(pushes):
            return False
        failure = None
        try:
            self._compute(pushes)
        except Exception as error:  # noqa: BLE001  - the client gets the error
            failure = error
        self._finished(action.version, (request,), failure)
        return True

    def obey(self, order: Order) -> None:
        """Take an order of the leader."""
        if self.refusal is None:
            self._orders.append(order)
            self.advance()

    def turn(self, kind: OrderKind, number: int, version: int) -> None:
        """Order all shards of the tensor to save or load, as turn `number`, between the same two steps."""
        if self.leader is not None and self.refusal is None:
            self.leader.machine.restart(version, {})
            self._orders.append(self.leader.order(kind, number))
            self.advance()

    def advance(self) -> None:
        """Carry out the orders whose requests have arrived."""
        if self._advancing:  # this rank handles the answers to itself immediately
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
                reads = order.kind == OrderKind.APPLY and self.readers.snapshots
                if reads and not self.memory.leave_to_readers(self.advance):
                    return
                requests = self._gather(order)
                if requests is None:
                    return
                self._orders.popleft()
                self._carry_out(order, requests)
        finally:
            self._advancing = False
            if self._waiting:
                self._serve_waiting()
            self._answers.applied()

    def _gather(self, order: Order) -> list[tuple[Request, float]] | None:
        """Return the requests of an order, each with its weight, or None before the arrival of all."""
        for client, number, _ in order.parts:
            if (client, number) not in self._arrived and client not in self._context.gone:
                return None
        found, now = [], perf_counter()
        for client, number, weight in order.parts:
            entry = self._arrived.pop((client, number), None)
            if entry is not None:
                self._context.counts["held_seconds"] += now - entry[1]
                found.append((entry[0], weight))
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
            elif not isinstance(request, Change):
                continue
            elif (error := error_of(partial(self._configure, request.settings))) is not None:
                self._answers.refuse(request, error)
            else:
                self._answers.answer(request.client, request.number)

    def _configure(self, settings: dict[str, float]) -> None:
        self.rule.configure(self.memory.state(self.rule), **settings)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def work(self, work: Callable[[], object], over: Callable[[BaseException | None], None]) -> None:
        """Do `work` on the memory, which nothing changes meanwhile, then call `over`."""

        def done(error: BaseException | None) -> None:
            self._busy = False
            over(error)
            self.advance()

        self._busy = True
        self._context.service.do(self.memory.data.nbytes, work, done)

    def take(self, restored: Restored) -> None:
        """Continue with the values of a checkpoint."""
        self.memory.restore(restored)
        self._restart(restored)

    def _restart(self, restored: Restored) -> None:
        self.version = max(self.version, restored.version)
        for client, uid in enumerate(self._context.uids):
            self.marks[client] = max(self.marks.get(client, 0), restored.marks.get(uid, 0))
        if self.leader is not None:
            self.leader.machine.restart(restored.version, self.marks)

    # --- steps -------------------------------------------------------------------------------------------------------

    def _apply(self, order: Order, pushes: list[tuple[Pushing, float]]) -> None:
        self.readers.stepped()

        def over(error: BaseException | None) -> None:
            was_busy, self._busy, self._applying = self._busy, False, ()
            self._finished(order.version, [push for push, _ in pushes], error)
            if was_busy:
                self.advance()

        if self._swap(pushes):
            over(None)
        elif self.replaces:
            if pushes and pushes[-1][0].value is not None:
                self.memory.data = pushes[-1][0].value.clone()
            over(None)
        elif self._is_light(pushes):
            over(error_of(partial(self._compute, pushes)))
        else:
            self._busy, self._applying = True, [push for push, _ in pushes]
            self._context.service.run(partial(self._compute, pushes), over)

    def _swap(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        """Return True if the pushed values have become the memory."""
        return self.memory.swap(pushes)

    def _is_light(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        """Return True if a step is computed inline."""
        if len(pushes) * self.memory.data.nbytes > LIGHT_BYTES:
            return False
        return not any(isinstance(self._context.rules[push.rule], Function) for push, _ in pushes)

    def _compute(self, pushes: Sequence[tuple[Pushing, float]]) -> None:
        """Apply the pushes of a step, in any thread."""
        if not pushes:  # their clients are gone
            return
        memory, context = self.memory, self._context
        if memory.uses:
            memory.make_private()
        pieces = []
        for push, weight in pushes:
            assert push.value is not None
            value = push.value
            if push.coded:
                value = context.decoded(value, memory.data.dtype, memory.data.numel())
            pieces.append(Piece(context.rules[push.rule], value, push.alpha, weight))
        began = perf_counter()
        apply_step(memory.data, pieces, memory.state)
        context.counts["step_seconds"] += perf_counter() - began

    def _finished(self, version: int, pushes: Sequence[Pushing], error: BaseException | None) -> None:
        self.version = version
        counts = self._context.counts
        counts["applied"] += len(pushes) if error is None else 0
        counts["steps"] += 1
        for push in pushes:
            self.marks[push.client] = push.number
            if error is None:
                if push.buffer is not None:
                    self._answers.recycle(push)
                self._answers.done(push, Stage.APPLIED)
            else:
                self._answers.refuse(push, error)


class Shards(dict[int, Shard]):
    """All shards of one server, by key."""

    def led(self) -> dict[Shard, Leader]:
        """Return the shards of tensors that this server leads, with their leaders (any thread)."""
        return {shard: shard.leader for shard in list(self.values()) if shard.leader is not None}

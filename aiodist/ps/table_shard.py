"""One server's rows of a table: requests and orders are those of any tensor, and change rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aiodist.ps.answers import Answers, Pulling, Pushing, Restored
from aiodist.ps.context import Context
from aiodist.ps.row_store import RowStore
from aiodist.ps.rows import ID_BYTES, TableSpec, ids_in, owners, unpack
from aiodist.ps.rules import RULES
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.shard import Shard
from aiodist.ps.wire import TABLE, Order


class TableShard(Shard):
    """One server's rows of one table (transport lock held, unless a method says otherwise).

    `owners` defines the server of each row. A push goes to every server, also to one without rows, so that all servers
    go through the same versions.
    """

    def __init__(
        self, context: Context, answers: Answers, turned: Callable[[Shard, Order], None], call: dict[str, Any]
    ) -> None:
        super().__init__(context, answers, turned, call)
        self.pushed_dtype = torch.uint8
        self.memory.waits_for_readers = True  # reads gather rows on this server, even if the reading process is stopped
        self.spec = TableSpec.from_json(call["table"])
        self.store = RowStore(self.spec)
        self._count = len(self.spans)

    def mine(self, ids: Tensor) -> Tensor:
        return owners(ids, self._count) == self.number

    def check_mine(self, ids: Tensor) -> None:
        if self._count > 1 and not bool(self.mine(ids).all()):
            raise ValueError(f"ids that belong to other servers than {self._context.rank}")

    def release(self, client: int, number: int) -> None:
        room = self.readers.lookers.get((client, number))
        if room is not None:
            self._context.pool.release(room)
        super().release(client, number)

    def hold(self, request: Pulling) -> None:
        """Change no row until the rows of `request` are gathered, also for a lock-free read: growing tensors move."""
        self.readers.snapshots.add((request.client, request.number))

    def take(self, restored: Restored) -> None:
        assert restored.store is not None
        self.store = restored.store
        self._restart(restored)

    def _serve(self, request: Pulling) -> None:
        """Send the client the present rows of its ids, from a buffer of the pool."""
        if request.client in self._context.gone:
            return
        assert request.rows is not None
        wanted, found, version = request.rows, list[Tensor](), self.version
        nbytes = wanted.nbytes // ID_BYTES * self.spec.row_bytes
        inline = nbytes <= self._context.coalescer.inline_bytes
        self.hold(request)

        def gather() -> None:
            with torch.inference_mode(False), torch.no_grad():
                ids = ids_in(wanted, self.spec, rise=False)
                self.check_mine(ids)
                found.append(self._context.pool.take_room(nbytes))
                self.store.read(ids, found[0][:nbytes].view(self.spec.dtype).view(-1, self.spec.dim))

        def gathered(error: BaseException | None) -> None:
            if error is not None:
                self._answers.refuse(request, error)
            elif request.client not in self._context.gone:
                if not inline:  # the client may read it until `RELEASE`
                    self.readers.lookers[(request.client, request.number)] = found[0]
                self._answers.send(self, request, version, found[0][:nbytes])
                if inline:
                    self._context.pool.release(found[0])
            self.readers.snapshots.discard((request.client, request.number))
            self.advance()

        if self._busy:  # a step runs there
            self._context.service.run(gather, gathered)
        else:
            self._context.service.do(nbytes, gather, gathered)

    def _swap(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        return False

    def _apply_now(self, push: Pushing) -> bool:
        return False

    def _is_light(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        nbytes = sum(push.value.nbytes for push, _ in pushes if push.value is not None)
        return nbytes <= LIGHT_BYTES and self.store.has_room(nbytes // self.spec.row_bytes + 1)

    def _compute(self, pushes: Sequence[tuple[Pushing, float]]) -> None:
        """Change the rows by all pushes of a step, in any thread: copies first, then by the optimizer, or by adding."""
        own = RULES["add"] if self.store.optimizer is None else None  # None is the optimizer
        rules = [None if push.rule == TABLE else self._context.rules[push.rule] for push, _ in pushes]
        if not all(rule is own or rule is RULES["copy"] for rule in rules):
            raise ValueError(f"a push to the table {self.name!r}: expected its own rule, or copy")
        with self._context.timed("step_seconds"), torch.inference_mode(False), torch.no_grad():
            pieces = []
            for push, weight in pushes:
                assert push.value is not None
                pieces.append((*unpack(push.value, self.spec), weight))
                self.check_mine(pieces[-1][0])
            for (ids, values, _), rule in zip(pieces, rules, strict=True):
                if rule is RULES["copy"]:
                    self.store.copy(ids, values)
            pieces = [piece for piece, rule in zip(pieces, rules, strict=True) if rule is own]
            if own is None and pieces:
                self.store.step(*_summed(pieces))
            elif pieces:
                ids, values, weight = pieces[0] if len(pieces) == 1 else (*_summed(pieces), 1.0)
                self.store.add(ids, values, weight)

    def _configure(self, settings: dict[str, float]) -> None:
        if self.store.optimizer is not None:
            self.store.optimizer.configure(settings)


def _summed(pieces: Sequence[tuple[Tensor, Tensor, float]]) -> tuple[Tensor, Tensor]:
    """Return the distinct ids of all pieces, and the weighted sum of their rows, in the order of pieces."""
    if len(pieces) == 1:
        ids, values, weight = pieces[0]
        return ids, values if weight == 1 else values * weight
    ids, places = torch.cat([ids for ids, *_ in pieces]).unique(return_inverse=True)
    total = pieces[0][1].new_zeros(ids.numel(), pieces[0][1].shape[1])
    for (_, values, weight), at in zip(pieces, places.split([len(ids) for ids, *_ in pieces]), strict=True):
        total.index_add_(0, at, values, alpha=weight)
    return ids, total

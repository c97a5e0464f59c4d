"""A table among the shards of a server: the orders are those of any tensor, what they change is rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aiodist.ps.answers import Answers
from aiodist.ps.consistency import Machine
from aiodist.ps.context import Context
from aiodist.ps.requests import Change, Pulling, Pushing, Restored
from aiodist.ps.rows.hashing import owners
from aiodist.ps.rows.packing import rows_in, unpack_ids
from aiodist.ps.rows.spec import TableSpec
from aiodist.ps.rows.store import RowStore
from aiodist.ps.rules import RULES
from aiodist.ps.service import LIGHT_BYTES
from aiodist.ps.shard import Shard
from aiodist.ps.wire import TABLE, Order, Stage

COPY, ADD = RULES["copy"], RULES["add"]


class RowPiece(NamedTuple):
    """One push of a step: rows, each there once, that are applied `how`."""

    how: object
    ids: Tensor
    values: Tensor
    """`(len(ids), dim)`, of the table's dtype; they are only read."""
    factor: float


class TableShard(Shard):
    """What one server has of one table; every method runs with the transport lock held, unless it says otherwise.

    Each server has the rows that `owners` says. A push tells every server, one without rows too, so that all of them go
    through the same versions, by the orders of the one that leads.
    """

    def __init__(
        self,
        context: Context,
        answers: Answers,
        serve: Callable[[Any, Pulling, int], None],
        unseen: Callable[[int], object],
        turned: Callable[[Shard, Order], None],
        call: dict[str, Any],
        machine: Machine | None,
    ) -> None:
        """As a `Shard`; `call` says too what the rows are."""
        super().__init__(context, answers, serve, unseen, turned, call, torch.empty(0, dtype=torch.uint8), machine)
        self.spec = TableSpec.from_json(call["table"])
        self.store = RowStore(self.spec)
        self._count = len(self.spans)

    def mine(self, ids: Tensor) -> Tensor:
        """Return which of `ids` are this server's, as bools; from any thread."""
        return owners(ids, self._count) == self.number

    def check_mine(self, ids: Tensor) -> None:
        """Raise ValueError unless all of `ids` are this server's; from any thread."""
        if self._count > 1 and not bool(self.mine(ids).all()):
            raise ValueError(f"ids that belong to other servers than {self._context.rank}")

    def show(self, pull: Pulling, room: Tensor) -> None:
        """Let the client look at rows in `room`, a buffer of the pool, until it says `RELEASE`."""
        self._lookers[(pull.client, pull.number)] = room

    def release(self, client: int, number: int) -> None:
        """A reader looks no more."""
        room = self._lookers.get((client, number))
        if room is not None:
            self._context.pool.release(room)
        super().release(client, number)

    def shown(self, client: int, number: int) -> Tensor:
        """Return what that client was let look at."""
        return self._lookers[(client, number)]

    @property
    def busy(self) -> bool:
        """The service thread changes it just now."""
        return self._busy

    def hold(self, request: Pulling) -> None:
        """Change no row until `read_over`, in a lock-free read too: growing tensors move."""
        self._readers.add((request.client, request.number))

    def read_over(self, request: Pulling) -> None:
        """The rows that it reads are gathered."""
        self._readers.discard((request.client, request.number))
        self.advance()
        self._release()

    def take(self, restored: Restored) -> None:
        """Go on from what was read of a checkpoint."""
        assert restored.store is not None
        self.store = restored.store
        self._restart(restored)

    # --- applying ----------------------------------------------------------------------------------------------

    def _fill(self, request: Pushing) -> None:
        """Rows have their first values by themselves: this says that the table is there."""
        self._answers.recycle(request)
        self._answers.done(request, Stage.APPLIED, 0)

    def _can_swap(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        return False

    def _is_light(self, pushes: Sequence[tuple[Pushing, float]]) -> bool:
        """Return whether it is done in no time: few bytes, and no growing."""
        nbytes = sum(push.value.nbytes for push, _ in pushes if push.value is not None)
        return nbytes <= LIGHT_BYTES and self.store.has_room(nbytes // self.spec.row_bytes + 1)

    def _compute_one(self, push: Pushing) -> None:
        self._compute([(push, 1.0)])

    def _compute(self, pushes: Sequence[tuple[Pushing, float]]) -> None:
        """Change the rows by all pushes of a step, in any thread."""
        if not pushes:
            return
        pieces = [self._piece(push, weight) for push, weight in pushes]
        with self._context.timed("step_seconds"), torch.inference_mode(False), torch.no_grad():
            for _, together in groupby(pieces, key=lambda piece: id(piece.how)):
                self._apply_pieces(list(together))

    def _piece(self, push: Pushing, weight: float) -> RowPiece:
        """Return what was pushed, checked."""
        assert push.value is not None
        ids, rest = unpack_ids(push.value, self.spec)
        self.check_mine(ids)
        how: object = self.store.optimizer
        if push.rule != TABLE:
            how = self._context.rules[push.rule]
        if how not in (COPY, ADD, self.store.optimizer) or how is None:
            raise ValueError(f"rule {push.rule} on the table {self.name!r}: expected add, copy or its optimizer")
        if push.coded:
            numel = ids.numel() * self.spec.dim
            values = self._context.decoded(rest, self.spec.dtype, numel).view(ids.numel(), self.spec.dim)
        else:
            values = rows_in(rest, ids.numel(), self.spec)
        return RowPiece(how, ids, values, push.alpha if how is COPY else weight * push.alpha)

    def _apply_pieces(self, pieces: Sequence[RowPiece]) -> None:
        """Apply pieces of one kind: their sum, or of copies the last of each row."""
        how = pieces[0].how
        if how is COPY:
            for piece in pieces:
                self.store.copy(piece.ids, piece.values * piece.factor if piece.factor != 1 else piece.values)
            return
        if how is ADD and len(pieces) == 1:
            (piece,) = pieces
            self.store.add(piece.ids, piece.values, piece.factor)
            return
        ids, total = _summed(pieces, self.spec.dim)
        if how is ADD:
            self.store.add(ids, total)
        else:
            self.store.step(ids, total)

    def _change(self, request: Change) -> None:
        try:
            self.spec.check_settings(request.settings, self.name)
            if self.store.optimizer is not None:
                self.store.optimizer.configure(request.settings)
        except Exception as error:  # noqa: BLE001  - it belongs to the client that asked
            self._answers.refuse(request, error)
        else:
            self._answers.answer(request.client, request.number)


def _summed(pieces: Sequence[RowPiece], dim: int) -> tuple[Tensor, Tensor]:
    """Return the ids of all pieces, each once, and the sum of their rows, in the order of pieces."""
    if len(pieces) == 1:
        (piece,) = pieces
        return piece.ids, piece.values if piece.factor == 1 else piece.values * piece.factor
    ids, places = torch.cat([piece.ids for piece in pieces]).unique(return_inverse=True)
    total = pieces[0].values.new_zeros(ids.numel(), dim)
    for piece, at in zip(pieces, places.split([piece.ids.numel() for piece in pieces]), strict=True):
        total.index_add_(0, at, piece.values, alpha=piece.factor)
    return ids, total

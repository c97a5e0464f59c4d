"""The exchanges of ranks in a step in addition to gradients: status, accounts, averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from aiodist.communicator import Communicator, parts_of
from aiodist.handles import Handle, kernel
from aiodist.nn.bucket_plan import BucketPlan
from aiodist.nn.buckets import Slot
from aiodist.nn.net_loop import Late, NetLoop
from aiodist.nn.pass_status import LEFT_OVER, PassAccount, PassStatus, StatusKind
from aiodist.nn.steps import Steps

T = TypeVar("T")


class Role(Enum):
    """A rank's part in a pass."""

    TRAINS = auto()
    """The rank has data and trains the parameters that it trains now."""
    FAILED = auto()
    """The rank had data, and raised before backward."""
    IDLE = auto()
    """The rank has no data left."""


class Consensus:
    """The exchange of a net's ranks about passes, on a communicator of its own."""

    def __init__(
        self,
        data: Communicator,
        comm: Communicator,
        op: Literal["mean", "sum"],
        slots: Sequence[Slot],
        steps: Steps,
        loop: NetLoop,
    ) -> None:
        self.data = data
        """Communicator of the gradients."""
        self.comm = comm
        """Communicator of the consensus."""
        self.op = op
        """Reduction of the gradients."""
        self.steps = steps
        self.loop = loop
        self.joining = 0
        """Number of open `join` blocks: gradients are not final before the pass status is known."""
        self.passes = 0
        """Number of finished passes and averages."""
        registry = parts_of(data).registry
        self.asks_stop: Callable[[], bool] = lambda: registry.resources.stop_requested
        """Function that returns True if this rank asks all ranks to stop after the pass."""
        self.answer: PassStatus | None = None
        """Sum of all ranks' status in the newest pass or average; None until it is known."""
        self.stopped_before = False
        """True if a rank asked to stop in the pass before the newest one."""
        self.parted = False
        """True if ranks have made different numbers of steps, which was raised; they make no more."""
        self._slots = slots

    # --- this rank's status ------------------------------------------------------------------------------------------

    def question(self, kind: StatusKind, role: Role) -> Tensor:
        """Return this rank's status before a pass: the parameters that it trains, none unless it trains now."""
        columns = [0.0] * len(self._slots)
        if role is Role.TRAINS:
            columns = [
                float(s.parameter.requires_grad) or LEFT_OVER * (s.parameter.grad is not None) for s in self._slots
            ]
        return self._packed(columns, kind, role)

    def header(self, plan: BucketPlan, role: Role) -> Tensor:
        """Return this rank's status at the begin of a pass in a `join` block, if it trains what `plan` says."""
        if role is Role.TRAINS and len(plan.members) == sum(plan.trained):  # looking at 1,000 parameters takes 0.3 ms
            return self._packed(plan.columns, StatusKind.JOIN, role)
        return self.question(StatusKind.JOIN, role)

    def _packed(self, columns: Sequence[float], kind: StatusKind, role: Role) -> Tensor:
        return PassStatus.pack(
            columns,
            self.data.size,
            self.data.rank,
            kind=kind,
            steps=self.steps.mark if role is Role.TRAINS else None,
            stop=self.asks_stop(),
            settings=self.steps.settings_hash if kind is StatusKind.AVERAGE else 0,
        )

    @property
    def stopped(self) -> bool:
        """True if a rank asked to stop in the newest pass or average, as far as is known."""
        return self.answer is not None and self.answer.stops > 0

    # --- exchanges: programs on the loop -----------------------------------------------------------------------------

    async def sum(self, status: Tensor, late: Late | None = None) -> PassStatus:
        """Return the sum of all ranks' `status`."""
        await self.issued(partial(self.comm.allreduce, status), late)
        return PassStatus.unpack(status, self.data.size)

    async def accounts(self, failure: str | None, active: bool, late: Late) -> list[PassAccount]:
        """Return the account of each rank; `failure` is the traceback of this one's error."""
        frozen = tuple(slot.name for slot in self._slots if not slot.parameter.requires_grad)
        steps, settings = self.steps, self.steps.settings_lines() if active else None
        account = PassAccount(failure, frozen if active else None, self.passes, str(steps), settings)
        return await self.issued(partial(self.comm.allgather_object, account), late)

    async def issued(self, call: Callable[[], Handle[T]], late: Late | None = None) -> T:
        """Return the result of the collective that `call` issues. Abort if `call` raises: other ranks wait for it."""
        try:
            handle = call()
        except Exception as error:
            if parts_of(self.data).dispatcher.lifetime.refusal is None:  # after the program has seen `error`
                self.loop.progress.post(self.data.abort, f"rank {self.data.rank} cannot go on: {error}")
            raise
        await kernel.transfers([(self.loop.wait, handle, late or self.loop.late)])
        return handle.result()

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """True unless a communicator was aborted or closed."""
        return all(parts_of(comm).dispatcher.lifetime.refusal is None for comm in (self.data, self.comm))

    def abort(self, why: str, *, wholly: bool) -> None:
        """Abort the communicator of the gradients, and if `wholly` that of the consensus too."""
        self.data.abort(why)
        if wholly:
            self.comm.abort(why)

    def refuse(self, error: BaseException) -> None:
        """Abort, since this rank cannot make another pass (any thread)."""
        for comm in (self.data, self.comm):
            self.loop.progress.post(comm.abort, f"rank {comm.rank} cannot reduce gradients any more: {error}")

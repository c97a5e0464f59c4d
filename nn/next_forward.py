"""The next forward, each layer of which waits for its own parameters: their last update may still be on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from aiodist.errors import CommunicatorError
from aiodist.handles import Handle
from aiodist.nn.buckets import Slot
from aiodist.nn.compute import Compute, called
from aiodist.nn.data_parallel import DataParallel
from aiodist.nn.forward import Forward
from aiodist.nn.guards import Guards, leaves
from aiodist.nn.module_like import ModuleLike
from aiodist.nn.reduction import Reduction


class Part(Protocol):
    """Parameters that are updated together."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Their slots."""
        ...


P = TypeVar("P", bound=Part)


class NextForward(Generic[P]):
    """Runs the forward of each step, and has each module wait before it runs for the parts that it uses.

    The first forward waits for all, and learns which modules use which parts (`Guards`).
    """

    def __init__(
        self,
        net: ModuleLike,
        compute: Compute,
        parts: Sequence[P],
        *,
        update: Callable[[Sequence[P]], None],
        finish: Callable[[], None],
        pending: Callable[[], bool],
    ) -> None:
        """`update` returns when some parts may be used, `finish` when all may; while some may not it is `pending`."""
        self.left: dict[P, Handle[None]] = {}
        """The parts whose update is not over, each with what that waits for, in the order in which those were sent."""
        self.failed: BaseException | None = None
        """The first error of an update that is still to be told."""
        self._compute = compute
        self._update, self._finish, self._pending = update, finish, pending
        self._unasked: set[P] = set()
        """Those of which the update was due when this forward began, and no module has needed the parameters yet."""
        self._guards = Guards(net.module, {slot.parameter: part for part in parts for slot in part.slots}, self._before)

    def run(self, forward: Forward, *, whole: bool = False) -> Tensor:
        """Return the loss whose backward is to be reduced; with `whole` forward begins behind all updates."""
        if whole or not self._guards.learnt:
            self._finish()
        self._update(self._guards.early)
        self._unasked = set(self.left)
        try:
            with self._guards.forward():
                loss = forward.first()
        finally:  # a step that fails sends zeros from where the gradients of the last one lie
            self._finish()
        self._check(loss)
        return forward.rest(loss)

    def reduce(self, prepare: Callable[[], Tensor]) -> Reduction:
        """Return the pass of a backward from what `prepare` returns; what an earlier update failed with comes first."""
        try:
            return self._compute.reduce(prepare)[1]
        except CommunicatorError:
            self.tell()  # what came before says why
            raise

    def tell(self) -> None:
        """Raise what an update failed with, once."""
        failed, self.failed = self.failed, None
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Take the hooks off the modules."""
        self._guards.remove()

    def _check(self, loss: Tensor) -> None:
        """After forward: what no module asked for, and was updated in the meantime, must not have been used."""
        slots = {slot.parameter: (slot.name, part) for part in self._unasked for slot in part.slots}
        if not slots or not isinstance(loss, Tensor):
            return
        wrong = [slots[parameter] for parameter in leaves(loss) if parameter in slots]
        if wrong:
            self._guards.early += list(dict.fromkeys(part for _, part in wrong))
            raise RuntimeError(
                f"{', '.join(sorted(name for name, _ in wrong))}: used in this forward while the last update was on "
                "its way, by another module than in the first step; from now on forward waits for it before it begins"
            )

    def _before(self, parts: Sequence[P], training: bool) -> None:
        """A module that needs `parts` is about to run."""
        current = self._compute.is_current()
        if training and current:
            self._unasked.difference_update(parts)
        if not self.left or not (current or self._pending()):
            return
        if not current:
            raise RuntimeError(
                "updates of this module are still on their way: call it on the compute thread, "
                "`await net.run(net, x)`, or `await opt.flush()` first"
            )
        if training:
            self._update(parts)
        else:
            self._finish()


class UpdatedAhead(Generic[P]):
    """An optimizer whose updates are over only in the next forward."""

    _ahead: NextForward[P]

    def __init__(self, net: DataParallel, make_optimizer: object) -> None:
        if not isinstance(net, DataParallel):
            raise TypeError(f"net is a {type(net).__name__}: expected what `await DataParallel.create(…)` returned")
        if isinstance(make_optimizer, Optimizer):
            raise TypeError("make_optimizer is an optimizer: expected a function that makes one of what it is given")
        self._net = net

    async def flush(self) -> None:
        """Return when every update is made, and this rank has the parameters of all: the correct last step.

        Raises what the last reduction, update or gathering of parameters raised, RuntimeError once the net is closed.
        """
        await self._net.run(self.make_updates)

    @called("opt.flush")
    def make_updates(self) -> None:
        """Do what `flush` does; for what runs on the compute thread, as a checkpoint does."""
        self._finish()
        self._ahead.tell()

    def _finish(self) -> None:
        raise NotImplementedError

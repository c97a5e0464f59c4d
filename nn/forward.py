"""What a step computes before its gradients are reduced, and the plain step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from aiodist.handles.tracing import span
from aiodist.nn.compute import Compute, called, check_loss
from aiodist.nn.settings import StepSettings


class Forward:
    """The forward passes of one step, and every backward but the last; called on the compute thread.

    A call returns the loss whose backward is to be reduced. `loss` is then what the step returns, detached: the sum of
    what the closures returned, before it was scaled. The gradients of the backwards add up on this rank.
    """

    def __init__(self, closures: Sequence[Callable[[], Tensor]], settings: StepSettings, compute: Compute) -> None:
        self.settings = settings
        self._closures = closures
        self._compute = compute
        self._losses: list[Tensor] = []

    def __call__(self) -> Tensor:
        """Return the loss of the last closure, once the others have had their backward."""
        return self.rest(self.first())

    def first(self) -> Tensor:
        """Return the loss of the first closure; `rest` takes it."""
        return self._run(self._closures[0])

    def rest(self, loss: Tensor) -> Tensor:
        """Run backward of `loss`, and do the same with the other closures; return the loss of the last."""
        for closure in self._closures[1:]:
            self._compute.accumulate(loss, {})
            loss = self._run(closure)
        return loss

    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        with span("forward"), self.settings.casting():
            loss = closure()
        check_loss(loss, {})
        self._losses.append(loss.detach())
        return loss if self.settings.scaler is None else self.settings.scaler.scale(loss)

    @property
    def loss(self) -> Tensor:
        """The sum of the losses; forward has run."""
        first, *others = self._losses
        return sum(others, first)


@called("net.step")
def plain_step(forward: Forward, opt: Optimizer, compute: Compute) -> Tensor:
    """Have `opt` step with the reduced gradients of `forward`, and return the loss; on the compute thread."""
    steps = compute.reducer.steps

    def prepare() -> Tensor:
        compute.drain()
        opt.zero_grad()
        return forward()

    _, reduction = compute.reduce(prepare)
    compute.use(reduction)
    with steps.making(), span("optimizer"):
        made = forward.settings.update(opt.param_groups, opt.step)
    if made:
        steps.note(opt)  # one that has copies of the parameters too
        forward.settings.advance()
    return forward.loss

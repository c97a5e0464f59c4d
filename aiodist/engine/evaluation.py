"""One evaluation: the figures of all ranks' data, without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aiodist.engine.batch import Batch, Loader, Model, prefetched
from aiodist.engine.hooks import Hooks
from aiodist.engine.meters import Assembly, Meter
from aiodist.engine.state import State
from aiodist.engine.steppers import Stepper
from aiodist.handles import Progress


async def evaluate(
    model: Model, stepper: Stepper, assembly: Assembly, hooks: Hooks, state: State, loader: Loader
) -> dict[str, float]:
    """Return the figures of the data of all ranks; each goes at its own pace, and they meet at the end."""
    meter = Meter(model.metrics)
    batch = Batch(model, state, hooks, meter, Progress.current())
    failure: Exception | None = None
    await assembly.open()
    try:
        async with stepper.open(lambda: False):
            await stepper.flush()
            with stepper.weights(), _switched_off(model.module):
                await hooks.call("start", state)
                async with prefetched(loader) as samples:
                    async for sample in samples:
                        state.step = state.batch = state.batch + 1
                        await batch.take(sample)
                        state.loss = await stepper.run(_without_gradients, batch)
                        if state.stop:
                            break
    except Exception as error:  # noqa: BLE001  - raised after the others have been told
        failure = error
    except BaseException as error:
        assembly.abort(f"was cancelled in this evaluation: {error!r}")
        raise
    state.metrics = meter.means(await assembly.exchange(meter.sums(), failure))
    await hooks.call("end", state)
    return dict(state.metrics)


def _without_gradients(batch: Batch) -> Tensor:
    with torch.no_grad():
        return batch()


@contextmanager
def _switched_off(module: nn.Module) -> Iterator[None]:
    """Have dropout, batch norm and their like evaluate in this block, and then do what each of them did before."""
    training = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in training:
            part.training = mode

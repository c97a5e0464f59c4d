"""`Engine`: the training loop, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, Unpack, overload

from torch import nn
from torch.optim import Optimizer

from aiodist.communicator import Communicator
from aiodist.engine.batch import Criterion, Loader, Metric, Split, WithCriterion, checked_metrics, model_of
from aiodist.engine.display import check_steps
from aiodist.engine.state import Event, Hook, Hooks, Position, State
from aiodist.engine.steppers import ClientStepper, PassStepper, Stepper
from aiodist.engine.training import Assembly, EngineOptions, Training, evaluate
from aiodist.handles.calls import located
from aiodist.nn import DataParallel
from aiodist.nn.drivers import Driver
from aiodist.ps.training import TrainingClient
from aiodist.types import Stateful

H = TypeVar("H", bound=Hook)


class Engine:
    """A training loop with hooks, which are plain functions or coroutine functions of a `State`.

    ```python
    net = await DataParallel.create(module, coll)
    engine = aiodist.Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), F.cross_entropy)

    @engine.on("epoch")
    def watch(state):
        state.stop = state.metrics["loss"] < 0.01

    await engine.train(loader, epochs=15)
    print(await engine.test(held_out))
    ```
    It does the same as `net.step` over `data.prefetch` in a loop. All ranks of the net make the same calls, and each
    rank makes its own engine, which sends nothing.

    Args:
        net: A `DataParallel`, for synchronous SGD; or a module, with a client of a parameter server as `optimizer`, for
            asynchronous SGD. The network is called with the input: a tuple or a list is its arguments, a dict its
            keywords.
        optimizer: An optimizer of torch, or a driver that makes one pass of all ranks in each step, such as
            `nn.PipelinedOptimizer`. Or a client (`ps.Downpour`, `ps.EASGD`, `ps.AsySGInCon`); enter it, `async with
            client:`, around `train`.
        criterion: A function of output and target that returns the loss, one element, or `(loss, aux)`; hooks find the
            latter in `state.aux`. None if the network itself returns the loss. For a criterion with parameters make the
            net of `WithCriterion(network, criterion)`.
        coll: The ranks that exchange figures. It is needed only if `net` is a module; without it figures are this
            rank's.
        metrics: Functions by name, of output and target of a batch, which return the mean over its samples. A mean over
            batches weighs each by its samples (`State.weight`). Ranks exchange figures once an epoch.
        split: A function that returns input and target of a sample. By default a sample is such a pair.
        **options: The options below.

    - `progress=True` shows a bar on the terminal of rank 0, or a line for each epoch if there is no terminal.
    - `debug=True` raises FloatingPointError for a loss, gradient or parameter that is not finite, with its name, rank,
      epoch and step, and MismatchError if the parameters of ranks differ after a step, in any bit. It costs a few
      passes over all parameters in each step.
    - `dynamic=False` raises RuntimeError in a step whose graph of operations and parameters differs from the first one.
    - `log=callback` calls `callback(step, values)` on rank 0 after each step, or with `log_every=n` each n steps, with
      "loss", "seconds" and "waited_seconds" of a step (see `DataParallel.configure`).
    - `profile=(3, 8)` writes a trace of steps 3 to 8 of each rank to the folder `traces`, with torch's profiler.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed.

    Cost: about 60 us more for each step than the bare loop.

    Source: TorchMPI's `AllReduceSGDEngine`, which is one of torchnet's: Collobert, van der Maaten and Joulin (2016),
    "Torchnet: An Open-Source Platform for (Deep) Learning Research".

    """

    def __init__(
        self,
        net: DataParallel | nn.Module,
        optimizer: Optimizer | Driver | TrainingClient,
        criterion: Criterion | None = None,
        *,
        coll: Communicator | None = None,
        metrics: Mapping[str, Metric] | None = None,
        split: Split | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        if unknown := options.keys() - EngineOptions.__annotations__:
            raise TypeError(f"{', '.join(sorted(unknown))}: expected {', '.join(EngineOptions.__annotations__)}")
        if (profile := options.get("profile")) is not None:
            check_steps(profile)
        self._net = net
        self._optimizer = optimizer
        self._options = options
        self._hooks = Hooks()
        self._stepper: Stepper
        if isinstance(net, DataParallel) and isinstance(optimizer, Optimizer | Driver):
            self._stepper, module = PassStepper(net, optimizer), net.module
        elif isinstance(net, nn.Module) and isinstance(optimizer, TrainingClient):
            self._stepper, module = ClientStepper(net, optimizer), net
        else:
            raise TypeError(
                f"Engine({type(net).__name__}, {type(optimizer).__name__}): expected a DataParallel and an optimizer, "
                "or a module and a client of a parameter server"
            )
        per_rank = net.configure().per_rank if isinstance(net, DataParallel) else ()
        self._model = model_of(net, module, criterion, checked_metrics(metrics), split, per_rank)
        self._assembly = Assembly(self._stepper.base if coll is None else coll)
        self._position = Position()
        self._bound_to: Communicator | None = None
        """Communicator of the last `rebind`."""
        self._training: Training | None = None
        self._state = self._new_state(training=True)

    def _new_state(self, *, training: bool) -> State:
        module = self._model.module
        return State(
            net=self._net,
            network=module.network if isinstance(module, WithCriterion) else module,
            optimizer=self._optimizer,
            rank=self._assembly.rank,
            size=self._assembly.size,
            training=training,
        )

    # --- hooks ----------------------------------------------------------------------------------------------------

    @overload
    def on(self, event: Event) -> Callable[[H], H]: ...

    @overload
    def on(self, event: Event, hook: H) -> H: ...

    def on(self, event: Event, hook: Any = None) -> Any:
        """Call `hook(state)` at `event`, after the hooks that were added before, and return the hook.

        Without a hook it returns a decorator.

        Args:
            event: "start", "sample", "forward", "criterion", "backward", "update", "epoch" or "end".
            hook: A plain function or a coroutine function of the `State`.

        Raises:
            ValueError: For an unknown event.
            TypeError: If `hook` cannot be called.

        Example:
            ```python
            engine = aiodist.Engine(net, opt, loss_fn)
            engine.on("update", lambda state: print(state.step, float(state.loss)))
            ```

        """
        if hook is None:
            return lambda given: self.on(event, given)
        self._hooks.add(event, hook)
        return hook

    @property
    def state(self) -> State:
        """The state of the current or last training."""
        return self._state

    # --- training and testing -------------------------------------------------------------------------------------

    @located
    async def train(self, loader: Loader, *, epochs: int) -> dict[str, float]:
        """Train until `epochs` epochs are complete, including those of earlier calls and of a loaded state.

        All ranks call it, with the same `epochs`. Ranks may have different numbers of batches: an epoch runs inside
        `net.join()`.

        Args:
            loader: An iterable, such as a `DataLoader`, an async iterable, or a `Prefetch`. Each epoch reads it once
                with `data.prefetch`. If it, its sampler or its dataset has `set_epoch`, that is called with the epoch,
                from 0 on.
            epochs: Number of epochs in all.

        Returns:
            The means of the loss and the metrics in the last complete epoch, the same on all ranks.

        Raises:
            RemoteError: If a hook, the loader, forward, backward or the optimizer raised on another rank, or that rank
                was cancelled. The other rank raises the exception itself.
            MismatchError: On all ranks, before a step, if they begin different epochs or have different `epochs`.
            ValueError: If `epochs` is not a number of epochs.
            RuntimeError: If a training of this engine is in progress.

        Example:
            ```python
            engine = aiodist.Engine(net, opt, loss_fn, progress=False)
            figures = await engine.train(loader, epochs=3)
            print(figures["loss"])
            ```

        If a rank sets `state.stop`, or is asked to stop (`Communicator.request_stop`), all ranks stop after the same
        step: the current one if backward had not ended, else the next; with a `PipelinedOptimizer` one later. In
        asynchronous SGD, in which no rank waits for another, this rank stops now and the others at the end of their
        epoch. A later call continues from there.

        Cost: two allgathers of small objects in each epoch.

        """
        if not isinstance(epochs, int) or epochs < 0:
            raise ValueError(f"epochs={epochs!r}: expected a number of epochs")
        if self._training is not None:
            raise RuntimeError("engine.train inside itself: expected one at a time")
        self._state.stop, self._state.epochs = False, epochs
        self._training = Training(
            self._model, self._options, self._stepper, self._assembly, self._position, self._state
        )
        try:
            await self._training.run(loader, self._hooks)
        finally:
            self._training = None
        return dict(self._state.metrics)

    @located
    async def test(self, loader: Loader) -> dict[str, float]:
        """Return the mean loss and metrics over the data of all ranks, without gradients, in evaluation mode.

        All ranks call it; hooks of "epoch" may call it too. Each rank may have any number of batches, or none. The
        hooks of "start", "sample", "forward", "criterion" and "end" are called with a state of their own, whose
        `training` is False. Pending updates are made first; with a client the parameters are its own.

        Args:
            loader: Batches, as for `train`.

        Returns:
            The mean loss as "loss", and each metric by its name.

        Raises:
            RemoteError: If another rank raised, when all ranks have reached the end.

        Example:
            ```python
            engine = aiodist.Engine(net, opt, loss_fn, progress=False)
            figures = await engine.test(loader)
            ```

        Cost: one allgather of small objects.

        """
        state = self._new_state(training=False)
        return await evaluate(self._model, self._stepper, self._assembly, self._hooks, state, loader)

    # --- with other ranks -------------------------------------------------------------------------------------------

    @located
    async def rebind(self, coll: Communicator, *state: Stateful) -> None:
        """Continue on another communicator, such as the world that `shrink` or `grow` returned.

        All ranks call it before `train`, also a rank that joins and has just made net and engine. It calls
        `net.rebind(coll, optimizer, *state)`, and shares how far training is. If the engine is on `coll` already,
        nothing happens.

        Args:
            coll: The new communicator.
            *state: Other objects with a `state_dict`, as for `net.rebind`.

        Raises:
            TypeError: For an engine with a client of a parameter server.
            RuntimeError: While training is in progress, or with both a scaler and a `PipelinedOptimizer`. Errors of
                `net.rebind` are raised too.

        An interrupted epoch continues after the last step that was made, and its figures are those of the rest of it.
        Batch k of a loader stands for one that all ranks share, so give a loader that divides it among the ranks of
        `coll`. Or use a `ShardQueue`, which uses each record once, with `await queue.rebind(coll, net.steps_done)`
        after this call.

        Cost: that of `net.rebind`, and one allgather of small objects.

        """
        if not isinstance(self._stepper, PassStepper):
            raise TypeError("rebind of an engine with a client of a parameter server: make a new client and engine")
        if self._training is not None:
            raise RuntimeError("engine.rebind in a training: expected it before")
        if coll is self._bound_to:
            return
        await self._stepper.rebind(coll, state)
        position = self._position.after(self._stepper.in_net(self._position.step))
        positions = await self._stepper.base.allgather_object(replace(position, random=None))
        self._position = position.furthest(positions)
        self._stepper.note(None)
        self._assembly, self._bound_to = Assembly(self._stepper.base), coll
        self._state.rank, self._state.size = coll.rank, coll.size

    # --- checkpoints ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return how far training is on this rank, between two steps or in a hook of "update" or "epoch".

        It has the numbers of epochs, steps and batches, and the states of torch's generators, now and at the beginning
        of the epoch. Net and optimizer have their own states. Save it for each rank: `aiodist.save(...,
        per_rank=[engine])`.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let `train` continue from this state: it skips the batches of the epoch that were trained on.

        Training equals an uninterrupted one bit by bit if the loader gives the same batches in an epoch again: by
        `set_epoch`, or by torch's generator when its iterator is made, as `shuffle=True` does. Figures are those of the
        rest of the epoch.

        Raises:
            ValueError: For another kind of state.
            RuntimeError: While training is in progress.

        """
        if self._training is not None:
            raise RuntimeError("engine.load_state_dict in a training: expected it before")
        if state.keys() != vars(self._position).keys():
            raise ValueError(f"state with {', '.join(sorted(map(str, state)))}: expected {', '.join(vars(Position()))}")
        self._position = Position(**state)
        self._stepper.note(None)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Let `train` continue from the states of another number of ranks, with the first incomplete epoch.

        It repeats that epoch; with a queue of shards as loader, whose states are loaded too, it trains on the rest of
        it.
        """
        epoch = min(state["epoch"] for state in states)
        self._position = Position(epoch, max(state["step"] for state in states))
        self._stepper.note(None)

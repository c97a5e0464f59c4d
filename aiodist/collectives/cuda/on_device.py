"""Runs a program on a CUDA device: all its work goes to one stream, and it ends when the device has finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from aiodist.backends.base import Done
from aiodist.handles import Handle, Operation, Progress
from aiodist.handles.kernel import Nested, Program, Transfer, transfers
from aiodist.streams import Events, Fence, OnStream, lend
from aiodist.streams.events import device_error, idle

T = TypeVar("T")
_AS_IT_IS = nullcontext()


class OnHost(list[Transfer]):
    """Calls of a step that queue nothing on a device: no stream is entered for them, which costs as much as they do."""


class StaysOnHost(OnHost):
    """Nor does what follows it in the program, unless it enters a stream; what follows an error may."""


class DeviceWork:
    """What one operation does on one device, from issue to end.

    Made when it is issued, on the caller's thread: what the caller's stream has queued by then comes first.
    """

    def __init__(
        self, progress: Progress, stream: torch.cuda.Stream, on_queued: Callable[[], None] = lambda: None
    ) -> None:
        """`on_queued` is called once when all of it is queued, or none will be; with the transport lock held."""
        self.stream = stream
        self.fence = Fence(progress, stream.device)
        self._progress = progress
        self._on_queued = on_queued
        self._caller = torch.cuda.current_stream(stream.device_index)
        self._events = Events.of(progress)
        self.keep: object = None
        """What must stay alive until its end."""
        self._lent: object = None
        self._behind: torch.cuda.Event | None = None
        if self._caller != stream and not idle(self._caller):
            try:
                self._behind = self._events.record(self._caller)
            except RuntimeError as error:
                self.cancel()  # the launch order goes on to the next operation
                raise device_error(error) from error

    def current(self) -> AbstractContextManager[object]:
        """Return a block in which its stream is the current one."""
        return OnStream(self.stream)

    def hurry(self, count: int) -> None:
        """Count what has threads hand the GIL over sooner: calls into CUDA give it away, a loop that spins takes it."""
        self._progress.hurry(count)

    def begin(self) -> None:
        """Go on only behind what the caller had queued."""
        if self._behind is not None:
            self.stream.wait_event(self._behind)
            self._events.release(self.stream.device_index, self._behind)
            self._behind = None

    def end(self, done: Done) -> None:
        """Transfer `done` when the device has done all that is queued."""
        self._on_queued()
        if idle(self.stream):
            self._over(done, None)
            return
        try:
            self.fence.reached(self._events.watch(self.stream, partial(self._over, done)))
        except RuntimeError as error:
            self._over(done, device_error(error))

    def _over(self, done: Done, error: BaseException | None) -> None:
        self.fence.reached(None)  # its event is somebody else's from now on
        if error is None:
            try:
                lend(self._lent, self._caller)
            except Exception as raised:  # noqa: BLE001  - of a tensor that is not torch's own
                error = raised
        self._lent = None
        done(error)

    def told(self, error: BaseException) -> BaseException:
        """Return what the operation fails with: torch's word for a device that is lost, as one of ours."""
        return device_error(error) if isinstance(error, torch.AcceleratorError) else error

    def cancel(self) -> None:
        """Nothing of it will be done; from any thread."""
        if self._behind is not None:
            self._events.release(self.stream.device_index, self._behind)
            self._behind = None
        self.fence.reached(None)
        # By way of the loop: the thread that drops it may hold the transport lock.
        self._progress.post(partial(self._progress.start, self._on_queued))

    def lend(self, result: object) -> None:
        """Keep the memory of a result that is made on this stream from being reused while the caller's reads it.

        From the end on, if that is a good one: on a device that is lost, torch cannot even free what was lent.
        """
        self._lent = result


def on_devices(program: Program[T], works: Sequence[DeviceWork]) -> Program[T]:
    """Run `program` with the stream of each of `works` as the current one of its device, in its steps as in its calls.

    What it queues begins after what the caller's streams had queued, and is over when this is: when `program` fails
    too, for what is queued already uses the tensors. Where it never begins, `works` are dropped.
    """
    for work in works:
        program = _on_device(program, work)
        program.send(None)
    return program


async def _on_device(program: Program[T], work: DeviceWork) -> T:
    try:
        await transfers([])  # as far as `send` takes it, so that closing it runs what follows
    except GeneratorExit:
        program.close()
        work.cancel()
        raise
    error: BaseException | None = None
    work.hurry(1)
    try:
        work.begin()
        result = await _with_stream(program, work)
    except GeneratorExit:
        raise
    except BaseException as raised:  # noqa: BLE001  - raised again below
        error = work.told(raised)
    else:
        work.lend(result)
    finally:
        work.hurry(-1)
    await transfers([work.end])
    if error is not None:
        raise error
    return result


async def _with_stream(program: Program[T], work: DeviceWork) -> T:
    """Run `program` with the stream of `work` as the current one, in its steps, its calls and the programs in those."""
    error: BaseException | None = None
    stays = False
    while True:
        with _AS_IT_IS if stays and error is None else work.current():
            try:
                calls = program.send(None) if error is None else program.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        error = None
        stays = isinstance(calls, StaysOnHost)
        try:
            await transfers(calls if isinstance(calls, OnHost) else [_call_with_stream(call, work) for call in calls])
        except GeneratorExit:
            program.close()
            raise
        except BaseException as raised:  # noqa: BLE001  - the program may deal with it
            error = raised


def _call_with_stream(call: Transfer, work: DeviceWork) -> Transfer:
    if isinstance(call, Nested):
        return Nested(_with_stream(call.program, work))
    return partial(_call, work, call)


def _call(work: DeviceWork, call: Transfer, done: Done) -> None:
    with work.current():
        call(done)


def attach(handle: Handle[Any], works: Sequence[DeviceWork], tensors: object) -> None:
    """Let `handle.wait_stream` order streams behind all of them, and keep what they use until the device is done.

    Which may be after the handle is: where the communicator was given up.
    """
    for work in works:
        work.keep = tensors
    if works and not handle.done():
        Operation.of(handle).set_fence(works[0].fence if len(works) == 1 else _Fences([work.fence for work in works]))


class _Fences:
    """Several ends, on several devices."""

    def __init__(self, fences: Sequence[Fence]) -> None:
        self._fences = fences

    def order(self, stream: Any, handle: Handle[Any], /) -> None:  # noqa: ANN401
        for fence in self._fences:
            fence.order(stream, handle)

    def look(self) -> bool:
        return any(map(Fence.look, self._fences))

"""Runs a program with one stream of a CUDA device. The program ends when the device has finished its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist.backends.base import Done
from aiodist.handles import Handle, Operation, Progress
from aiodist.handles.kernel import Part, Program, Transfer, transfer, transfers
from aiodist.streams import Events, Fence, OnStream, lend
from aiodist.streams.events import device_error, idle

T = TypeVar("T")
_AS_IT_IS = nullcontext()


class OnHost(list[Transfer]):
    """Transfers that queue no work on a device. To enter a stream would cost as much as these transfers."""


class StaysOnHost(OnHost):
    """Transfers as in `OnHost`.

    After the transfers succeed, the program's next step also runs without the operation's stream, so the step enters a
    stream itself for work.
    """


class DeviceWork:
    """The work of one operation on one device, from issue to end.

    The object is created on the caller's thread at issue, after the earlier work of the caller's stream.
    """

    def __init__(self, progress: Progress, stream: torch.cuda.Stream, *on_queued: Callable[[], object]) -> None:
        """Each of `on_queued` is called once, when all work is queued or is cancelled (transport lock held)."""
        self.stream = stream
        self.fence = Fence(progress, stream.device)
        self._progress = progress
        self._on_queued = on_queued
        self._caller = torch.cuda.current_stream(stream.device_index)
        self._events = Events.of(progress)
        self.given: Sequence[Tensor] = ()
        """Tensors of the caller, which stay alive until the end of the work."""
        self._lent: object = None
        self._awaited: torch.cuda.Event | None = None
        if self._caller != stream and not idle(self._caller):
            try:
                self._awaited = self._events.record(self._caller)
            except RuntimeError as error:
                self.cancel()  # the next operation in the launch order can start
                raise device_error(error) from error

    def current(self) -> AbstractContextManager[object]:
        """Return a context manager with the stream of the work as the current one."""
        return OnStream(self.stream)

    def hurry(self, count: int) -> None:
        """Shorten the GIL's switch interval (+1), or restore it (-1). Spinning threads take the GIL from CUDA calls."""
        self._progress.hurry(count)

    def begin(self) -> None:
        """Let the stream wait for the caller's earlier work."""
        if self._awaited is not None:
            self.stream.wait_event(self._awaited)
            self._events.release(self.stream.device_index, self._awaited)
            self._awaited = None

    def end(self, done: Done) -> None:
        """Call `done` when the device has done all queued work, as a transfer of the program."""
        self._queued()
        if idle(self.stream):
            self._finish(done, None)
            return
        try:
            self.fence.reached(self._events.watch(self.stream, partial(self._finish, done)))
        except RuntimeError as error:
            self._finish(done, device_error(error))

    def _queued(self) -> None:
        for call in self._on_queued:
            call()

    def _finish(self, done: Done, error: BaseException | None) -> None:
        self.fence.reached(None)  # the event will be reused
        if error is None:
            try:
                lend(self._lent, self._caller, but={t.untyped_storage().data_ptr() for t in self.given})
            except Exception as raised:  # noqa: BLE001  - raised by a tensor class that is not torch's
                error = raised
        self._lent = None
        done(error)

    def cancel(self) -> None:
        """Cancel the work before its start (any thread)."""
        if self._awaited is not None:
            self._events.release(self.stream.device_index, self._awaited)
            self._awaited = None
        self.fence.reached(None)
        # On the loop, since the calling thread may hold the transport lock.
        self._progress.post(self._progress.start, self._queued)

    def lend(self, result: object) -> None:
        """Protect the memory of a result, made on this stream, from reuse while the caller's stream reads it.

        The protection begins at a successful end. Memory of the caller's tensors is never protected, since on a lost
        device torch ends the process if protected memory is freed.
        """
        self._lent = result


def on_devices(program: Program[T], works: Sequence[DeviceWork], given: Sequence[Tensor | None] = ()) -> Program[T]:
    """Run `program` with the stream of each of `works` as the current one of its device, in its steps and transfers.

    The work begins after the earlier work of the caller's streams, and has finished when the returned program ends,
    also if `program` fails, since queued work uses the tensors. A close before the start cancels `works`. `given` are
    tensors of the caller, which stay alive until the device has finished, even after an abort.
    """
    for work in works:
        work.given = [t for t in given if t is not None]
        program = _on_device(program, work)
        program.send(None)
    return program


async def _on_device(program: Program[T], work: DeviceWork) -> T:
    try:
        await transfers([])  # `send` stops here, so that a close runs the handler below
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
        error = device_error(raised) if isinstance(raised, torch.AcceleratorError) else raised
    else:
        work.lend(result)
    finally:
        work.hurry(-1)
    await transfer(work.end)
    if error is not None:
        raise error
    return result


async def _with_stream(program: Program[T], work: DeviceWork) -> T:
    """Run `program` with the stream of `work` as the current one, in its steps, its transfers and nested programs."""
    error: BaseException | None = None
    stays = False
    while True:
        with _AS_IT_IS if stays and error is None else work.current():
            try:
                step = program.send(None) if error is None else program.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
        error = None
        stays = isinstance(step, StaysOnHost)
        try:
            await transfers(step if isinstance(step, OnHost) else [_part_with_stream(part, work) for part in step])
        except GeneratorExit:
            program.close()
            raise
        except BaseException as raised:  # noqa: BLE001  - thrown into the program
            error = raised


def _part_with_stream(part: Part, work: DeviceWork) -> Part:
    return (_start, work, *part) if isinstance(part, tuple) else _with_stream(part, work)


def _start(work: DeviceWork, start: Callable[..., object], *args: object) -> None:
    with work.current():
        start(*args)


def attach(handle: Handle[Any], works: Sequence[DeviceWork]) -> None:
    """Let `handle.wait_stream` order streams after all `works`."""
    if works and not handle.done():
        Operation.of(handle).set_fence(works[0].fence if len(works) == 1 else _Fences([work.fence for work in works]))


class _Fences:
    """Fences on several devices."""

    def __init__(self, fences: Sequence[Fence]) -> None:
        self._fences = fences

    def order(self, stream: Any, handle: Handle[Any], /) -> None:  # noqa: ANN401
        for fence in self._fences:
            fence.order(stream, handle)

    def look(self) -> bool:
        return any(map(Fence.look, self._fences))

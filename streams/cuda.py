"""`CudaStream`: a CUDA stream whose work is a handle."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final, ParamSpec, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from aiodist.handles import Account, Handle, Operation, Origin, Progress, in_flight, internals
from aiodist.streams.current import OnStream, check_not_capturing
from aiodist.streams.events import Events, Fence, device_error
from aiodist.streams.memory import dtype_name
from aiodist.streams.staging import Staging
from aiodist.streams.writes import check_writable, increment_version

__all__ = ["CudaStream", "check_not_capturing", "event_handle", "lend"]

P = ParamSpec("P")
T = TypeVar("T")

ROLES: Final = ("compute", "to-device", "to-host", "local", "global")


class CudaStream:
    """Ordered work on one CUDA device. Each piece of work is a handle, done when the device has finished the work.

    ```python
    copies = CudaStream.of("to-device")
    x = await copies.copy(torch.empty_like(batch, device="cuda"), batch)
    ```
    `CudaStream.of(role)` returns the same stream each time, one per device and loop. The roles are "compute",
    "to-device" and "to-host" for copies, and "local" and "global" for messages within a host and between hosts.
    `CudaStream(stream)` wraps another stream. A stream belongs to the loop that made it. Only the thread of that loop
    may call the stream.

    Attributes:
        stream: the `torch.cuda.Stream`.
        role: one of the roles above, or "user".

    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, role: str = "user") -> None:
        """Wrap `stream`, or the current one for None. Raises `RuntimeError` if there is no CUDA device."""
        check_cuda()
        self.stream = torch.cuda.current_stream() if stream is None else stream
        self.role = role
        self._progress = Progress.current()
        self._events = Events.of(self._progress)
        self._account = Account(self._progress.loop)
        self._seq = 0

    @classmethod
    def of(cls, role: str, device: torch.device | int | str | None = None) -> Self:
        """Return the stream of a role on `device`, or on the current device for None, made at first use.

        Raises ValueError for an unknown role, and `RuntimeError` if there is no CUDA device.
        """
        if role not in ROLES:
            raise ValueError(f"role={role!r}: expected one of {', '.join(ROLES)}")
        check_cuda()
        index = index_of(device)
        key = cls, role, index
        return Progress.current().own(key, lambda: cls(torch.cuda.Stream(device=index), role=role))

    @property
    def device(self) -> torch.device:
        """Device of the stream."""
        return self.stream.device

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, done when the device has finished the work that `fn` queued.

        `fn` runs inline, with this stream as the current one, and should only queue work. The call raises an error of
        `fn`. The work is not ordered after work of other streams: see `wait`. The handle keeps `fn`, its arguments and
        its result until the end. The result's tensors, also in containers and dataclasses, may then be used on the
        stream that was current at the call. Raises `RuntimeError` during the capture of a CUDA graph. Costs one event
        more than `fn`.
        """
        self._check()
        caller = torch.cuda.current_stream(self.device)
        with OnStream(self.stream):
            value = fn(*args, **kwargs)
        op = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return self._until_over(op, value, (fn, value, args, kwargs), None if caller == self.stream else caller)

    def record(self) -> Handle[None]:
        """Return a handle that is done when all work queued so far is finished. Raises and costs as `submit`."""
        self._check()
        return self._until_over("record", None, None)

    def copy(self, into: Tensor, t: Tensor) -> Handle[Tensor]:
        """Copy `t` into `into`, of equal shape and dtype, and return `into`. At least one must be on the device.

        The copy begins after the work that the current stream has queued. `t` may be reused when the handle is done.
        Raises ValueError if shapes or dtypes differ, and `RuntimeError` during the capture of a CUDA graph. Cost: one
        copy by the device. If the host's memory is not pinned, one more by the host, at the call or at the end.
        """
        self._check()
        if into.shape != t.shape or into.dtype is not t.dtype:
            raise ValueError(
                f"copy of {dtype_name(t.dtype)} {list(t.shape)} into {dtype_name(into.dtype)} {list(into.shape)}: "
                "expected the same"
            )
        check_writable(into, "copy", "into")
        operation: Operation[Tensor] = self._operation("copy", t.nbytes)
        claims = [(into.data_ptr(), into.nbytes, True, into), (t.data_ptr(), t.nbytes, False, t)]
        in_flight.acquire_all(claims, operation.handle)
        increment_version([into])
        fence = Fence(self._progress, self.device)
        operation.set_fence(fence)
        operation.keep(into, t)

        def finish(error: BaseException | None) -> None:
            increment_version([into])
            in_flight.release_all(claims)
            _end(operation, fence, into, error)

        staging = Staging.of(self._progress)
        try:
            staging.order(self.stream, torch.cuda.current_stream(self.device))
        except RuntimeError as error:
            finish(device_error(error))
        else:
            staging.copy(into, t, self.stream, fence.reached, finish)
        return operation.handle

    def wait(self, stream: torch.cuda.Stream | CudaStream | None = None) -> None:
        """Order later work after the work that `stream`, or the current stream for None, has queued so far.

        Raises `RuntimeError` during the capture of a CUDA graph.
        """
        check_not_capturing(self.stream.device_index)
        if isinstance(stream, CudaStream):
            stream = stream.stream
        other = torch.cuda.current_stream(self.device) if stream is None else stream
        Staging.of(self._progress).order(self.stream, other)

    def wait_handle(self, handle: Handle[Any], /) -> None:
        """Order later work after `handle`; see `Handle.wait_stream`.

        If the operation ends on the host, a thread other than the loop's blocks until the end, and the loop's thread
        raises `RuntimeError`. Raises `RuntimeError` during the capture of a CUDA graph.
        """
        check_not_capturing(self.stream.device_index)
        if (fence := internals.fence_of(handle)) is not None:
            fence.order(self, handle)
        elif not handle.done():
            if self._progress.owns_thread():
                raise RuntimeError(f"{handle} ends on the host: await it before {self} continues")
            internals.block(handle)

    def _check(self) -> None:
        if Progress.current() is not self._progress:
            raise RuntimeError(f"{self} belongs to another event loop: call CudaStream.of on this one")
        check_not_capturing(self.stream.device_index)

    def _operation(self, op: str, nbytes: int = 0) -> Operation[Any]:
        operation: Operation[Any] = Operation(self._progress, op, self._seq, nbytes, Origin.here(3), self._account)
        self._seq += 1
        return operation

    def _until_over(
        self,
        op: str,
        value: T,
        keep: Any,  # noqa: ANN401
        caller: torch.cuda.Stream | None = None,
    ) -> Handle[T]:
        """Return a handle that is done at an event recorded now, which lends `value` to the stream `caller`."""
        operation: Operation[T] = self._operation(op)
        operation.keep(keep)
        fence = Fence(self._progress, self.device)
        operation.set_fence(fence)

        def over(error: BaseException | None) -> None:
            if error is None and caller is not None:
                # At the end, since torch cannot free lent memory of a lost device.
                try:
                    lend(value, caller)
                except Exception as raised:  # noqa: BLE001  - of a tensor that is not torch's own
                    error = raised
            _end(operation, fence, value, error)

        try:
            event = self._events.record(self.stream)
        except RuntimeError as error:
            over(device_error(error))
        else:
            fence.reached(event)
            self._progress.start(partial(self._events.add, self.stream, event, over))
        return operation.handle

    def __repr__(self) -> str:
        return f"<CudaStream {self.role!r} on {self.device}>"


def lend(result: object, stream: torch.cuda.Stream, but: Collection[int] = ()) -> None:
    """Keep the memory of a result of another stream from being reused while `stream` reads the result.

    The tensors may be in dataclasses and in all containers that torch knows. Storages at the addresses `but` are
    skipped.
    """
    for t in _tensors(result):
        # Torch records strided tensors only.
        if t.is_cuda and t.layout is torch.strided and t.untyped_storage().data_ptr() not in but:
            t.record_stream(stream)


def _tensors(x: object) -> list[Tensor]:
    if x is None or isinstance(x, Tensor):
        return [] if x is None else [x]
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(x):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found += _tensors(getattr(leaf, field.name, None))
    return found


def check_cuda() -> None:
    """Raise RuntimeError if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device here: torch.cuda.is_available() is False")


def index_of(device: torch.device | int | str | None) -> int:
    """Return the number of a CUDA device, or raise ValueError for another kind of device."""
    if isinstance(device, int):
        return device
    if device is None:
        return torch.cuda.current_device()
    known = torch.device(device)
    if known.type != "cuda":
        raise ValueError(f"device {known}: expected a CUDA device")
    return torch.cuda.current_device() if known.index is None else known.index


def event_handle(event: torch.cuda.Event) -> Handle[None]:
    """Return a handle that is done when the last record of `event` is complete.

    Raises RuntimeError during the capture of a CUDA graph.
    """
    progress = Progress.current()
    device = event.device or torch.device("cuda", torch.cuda.current_device())
    check_not_capturing(device.index)
    operation: Operation[None] = Operation(progress, "event", origin=Origin.here())
    operation.keep(event)
    fence = Fence(progress, device)
    operation.set_fence(fence)
    fence.reached(event)
    progress.start(partial(Events.of(progress).add_other, event, partial(_end, operation, fence, None)))
    return operation.handle


def _end(operation: Operation[T], fence: Fence, value: T, error: BaseException | None) -> None:
    """End an operation after its work on the device, with the device's error or None."""
    fence.reached(None)
    if error is None:
        operation.resolve(value)
    else:
        operation.reject(error)

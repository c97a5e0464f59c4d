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
    """Ordered work on one CUDA device; each piece of work is a handle, done when the device has done it.

    ```python
    copies = CudaStream.of("to-device")
    x = await copies.copy(torch.empty_like(batch, device="cuda"), batch)
    ```
    `CudaStream.of(role)` is the same for each device of a loop: "compute", "to-device" and "to-host" for copies,
    "local" and "global" for what ranks of one host, and of several, send one another. `CudaStream(stream)` is any
    other. It belongs to the loop it was made on and is called from that loop's thread alone.

    Attributes:
        stream: the `torch.cuda.Stream`.
        role: what it is for, or "user".

    """

    def __init__(self, stream: torch.cuda.Stream | None = None, *, role: str = "user") -> None:
        """Of `stream`; None is the current one. Raises `RuntimeError` where there is no CUDA device."""
        check_cuda()
        self.stream = torch.cuda.current_stream() if stream is None else stream
        self.role = role
        self._progress = Progress.current()
        self._events = Events.of(self._progress)
        self._account = Account(self._progress.loop)
        self._seq = 0

    @classmethod
    def of(cls, role: str, device: torch.device | int | str | None = None) -> Self:
        """Return the stream of that role on `device` (None: the current one), made at first use.

        Raises ValueError for an unknown role, `RuntimeError` where there is no CUDA device.
        """
        if role not in ROLES:
            raise ValueError(f"role={role!r}: expected one of {', '.join(ROLES)}")
        check_cuda()
        index = index_of(device)
        key = cls, role, index
        return Progress.current().own(key, lambda: cls(torch.cuda.Stream(device=index), role=role))

    @property
    def device(self) -> torch.device:
        """The device that it is on."""
        return self.stream.device

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Return a handle of `fn(*args, **kwargs)`, done when the device has done all that it queued.

        `fn` runs here and now, with this stream the current one, and should only queue work: what it raises is raised
        by the call. It is not ordered behind what other streams do: see `wait`. `fn`, its arguments and its result are
        kept until then; and the memory of the result's tensors, in containers and dataclasses too, is the caller's
        stream's as well from then on. Raises `RuntimeError` while a CUDA graph is being captured. Costs an
        event beside what `fn` queues.
        """
        self._check()
        caller = torch.cuda.current_stream(self.device)
        with OnStream(self.stream):
            value = fn(*args, **kwargs)
        op = getattr(fn, "__qualname__", None) or type(fn).__qualname__
        return self._until_over(op, value, (fn, value, args, kwargs), None if caller == self.stream else caller)

    def record(self) -> Handle[None]:
        """Return a handle that is done when all that was queued so far is; raises and costs what `submit` does."""
        self._check()
        return self._until_over("record", None, None)

    def copy(self, into: Tensor, t: Tensor) -> Handle[Tensor]:
        """Return `into`, with the elements of `t`, either of which lies on the device; of equal shape and dtype.

        It begins after what the current stream has queued, and `t` may be reused when the handle is done. Raises
        ValueError where shapes or dtypes differ, `RuntimeError` while a CUDA graph is being captured. Cost: one copy by
        the device; from and to memory that is not pinned one by the host too, at the call or at the end.
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
        """Let what is queued from now on begin after what `stream` (None: the current one) has queued so far.

        Raises `RuntimeError` while a CUDA graph is being captured.
        """
        check_not_capturing(self.stream.device_index)
        if isinstance(stream, CudaStream):
            stream = stream.stream
        other = torch.cuda.current_stream(self.device) if stream is None else stream
        Staging.of(self._progress).order(self.stream, other)

    def wait_handle(self, handle: Handle[Any], /) -> None:
        """Let what is queued from now on begin after `handle`; see `Handle.wait_stream`.

        An operation that ends on the host is waited for, in a thread other than the loop's; on the loop's it must be
        over, else `RuntimeError` is raised, as it is while a CUDA graph is being captured.
        """
        check_not_capturing(self.stream.device_index)
        if (fence := internals.fence_of(handle)) is not None:
            fence.order(self, handle)
        elif not handle.done():
            if self._progress.owns_thread():
                raise RuntimeError(f"{handle} ends on the host: await it before {self} goes on")
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
        """`caller` is the other stream that `value` is lent to."""
        operation: Operation[T] = self._operation(op)
        operation.keep(keep)
        fence = Fence(self._progress, self.device)
        operation.set_fence(fence)

        def over(error: BaseException | None) -> None:
            if error is None and caller is not None:
                # Not before: on a device that is lost, torch cannot even free what was lent.
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
    """Keep the memory of a result that was made on another stream from being reused while `stream` reads it.

    The tensors may be in any containers that torch looks into, and in dataclasses. Storages at the addresses `but` are
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
    """Raise RuntimeError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise RuntimeError("there is no CUDA device here: torch.cuda.is_available() is False")


def index_of(device: torch.device | int | str | None) -> int:
    """Return the number of a CUDA device; raise ValueError for another kind."""
    if isinstance(device, int):
        return device
    if device is None:
        return torch.cuda.current_device()
    known = torch.device(device)
    if known.type != "cuda":
        raise ValueError(f"device {known}: expected a CUDA device")
    return torch.cuda.current_device() if known.index is None else known.index


def event_handle(event: torch.cuda.Event) -> Handle[None]:
    """Return a handle that is done when `event`, as it was recorded last, is over.

    Raises RuntimeError while a CUDA graph is being captured.
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
    """End an operation whose work the device has finished, or failed in."""
    fence.reached(None)
    if error is None:
        operation.resolve(value)
    else:
        operation.reject(error)

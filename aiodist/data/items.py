"""One item, and its copy to a CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from aiodist.data.nesting import rebuilt
from aiodist.handles import Done, Handle, Operation, Permit, Progress, join
from aiodist.handles.calls import located
from aiodist.streams import CudaStream, OnStream, Staging


@dataclass(slots=True)
class Made:
    """An item that is ready, or the error that came in its place: `StopAsyncIteration` at the end of the source."""

    value: Any = None
    error: BaseException | None = None
    nbytes: int = 0
    reading: float = 0.0
    """Seconds that the source took."""
    transforming: float = 0.0
    """Seconds that `transform` took."""
    copying: float = 0.0
    """Seconds from when it was ready on the host until it was on the device."""
    copies: Sequence[Tensor] = ()
    """The tensors in it that were copied to the device."""
    late: bool = False
    """Something in it goes to the device only when it is taken."""

    def failed(self, error: BaseException) -> Made:
        """Return what becomes of it when it cannot be brought to the device."""
        return replace(self, value=None, error=error, nbytes=0, copies=(), late=False)


@dataclass(eq=False, slots=True)
class Item:
    """The place of an item in the order: asked for, read, transformed, and then `operation` ends."""

    seq: int
    operation: Operation[Made]
    settle: Callable[[Item, Made], None]
    permit: Permit = field(init=False)
    settled: bool = False
    """The pass has the outcome."""

    def release(self) -> None:
        """Return the bytes of an item that was taken or dropped, and release its references (loop)."""
        self.settled = True
        self.permit.release()
        del self.permit  # which knows of the item: its tensors would live until the garbage collector comes

    def wake(self, handle: Handle[Any], late: Exception | None, /) -> None:
        if late is None:
            self.settle(self, handle.result())


DeviceLike = torch.device | int | str
Copies = list[tuple[Tensor, Tensor]]


def device_of(device: DeviceLike | None) -> torch.device | None:
    """Return the CUDA device that is meant, None for the CPU; raise ValueError for another one."""
    if device is None:
        return None
    expected = "expected a CUDA device, the CPU, or None"
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: {expected}") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: {expected}")
    return None if found.type == "cpu" else found


def _numbered(device: torch.device) -> torch.device:
    """Return `device` with its number; raise RuntimeError where it is not here."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"prefetch(device={str(device)!r}): torch.cuda.is_available() is False: leave `device` away where there is "
            "no GPU, or install a torch that is built with CUDA"
        )
    if device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.index >= (count := torch.cuda.device_count()):
        raise RuntimeError(f"prefetch(device={str(device)!r}): there are {count} CUDA devices here, from cuda:0")
    return device


class ToDevice:
    """Copies ready items to the device, and resolves their handles.

    The thread that has prepared an item (a reader's, a worker's or the loop's) only allocates memory on the device. The
    progress thread begins the copy and polls its end. So no reader waits for the transport lock, which a large transfer
    may hold for long, nor for the loop, which may run a step.

    The memory is allocated on the copy stream and used on the consumer's. `record_stream` with the consumer's stream
    prevents an early reuse.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = _numbered(device)
        self._progress = Progress.current()
        self._staging = Staging.of(self._progress)
        self._stream = CudaStream.of("to-device", self._device).stream
        self._lock = threading.Lock()
        self._in_flight = 1
        """Number of items that are copied, plus one until the close."""
        self._ended: Operation[None] = Operation(self._progress, "copies to the device", polled=False)

    def put(self, item: Item, made: Made) -> None:
        """Copy `item`, then resolve its handle (any thread)."""
        if made.error is not None:
            item.operation.resolve(made)
            return
        began = perf_counter()
        room = _Room(self._device)
        try:
            with OnStream(self._stream):
                made.value = rebuilt(made.value, room.copy_of)
            parts = [part for part in room.parts() if part]
        except Exception as error:  # noqa: BLE001  - no memory, or a container that cannot be built
            item.operation.resolve(made.failed(error))
            return
        made.late = room.late
        made.copies = [into for into, _ in room.copies if into.numel()]
        if not parts:
            item.operation.resolve(made)
            return
        with self._lock:
            self._in_flight += 1
        copied = join(len(parts), partial(self._copied, item, made, began))
        self._progress.start_in_thread(partial(self._begin, parts, copied))

    def _begin(self, parts: list[Copies], copied: Done) -> None:
        for part in parts:
            self._staging.copies(part, self._stream, lambda _: None, copied)

    def _copied(self, item: Item, made: Made, began: float, error: BaseException | None) -> None:
        """All parts are there, or failed; with the transport lock held."""
        if error is not None:
            made = made.failed(error)
        made.copying = perf_counter() - began
        item.operation.resolve(made)
        self._count_down()

    def take(self, made: Made) -> Made:
        """Return `made` as its consumer gets it, whose stream is the current one, or what torch raises; on the loop."""
        try:
            stream = torch.cuda.current_stream(self._device)
            for t in made.copies:
                t.record_stream(stream)
            if made.late:
                made.value = rebuilt(made.value, self._moved)
        except Exception as error:  # noqa: BLE001  - it ends the stream, as one of the source does
            return made.failed(error)
        return made

    def _moved(self, x: Any) -> Any:  # noqa: ANN401
        return x if isinstance(x, Tensor) and not x.is_cpu else x.to(self._device, non_blocking=True)

    def _count_down(self) -> None:
        """Count one item less in flight (any thread)."""
        with self._lock:
            self._in_flight -= 1
            ended = self._in_flight == 0
        if ended:
            self._ended.resolve(None)

    @located
    async def aclose(self) -> None:
        """Wait for the copies in flight, after the last `put`."""
        self._count_down()
        await self._ended.handle


class _Room:
    """Room on a device for one item's tensors, and where each comes from."""

    def __init__(self, device: torch.device) -> None:
        self.late = False
        """Something in it is moved by torch, or by itself, when it is taken."""
        self.copies: Copies = []
        self._device = device
        self._changed: dict[int, tuple[object, object]] = {}
        """Each tensor with its replacement, by id; the tensor must live as long as its id is used."""

    def parts(self) -> tuple[Copies, Copies]:
        """Return the flat tensors to copy directly, and those to copy through pinned memory."""
        parts: tuple[Copies, Copies] = [], []
        for into, t in self.copies:
            if t.numel():
                parts[not t.is_pinned()].append((_flat(into), _flat(t)))
        return parts

    def copy_of(self, x: Any) -> Any:  # noqa: ANN401
        """Return what stands for `x` on the device; the same when it comes again."""
        if isinstance(x, Tensor) and not x.is_cpu:
            return x
        entry = self._changed.get(id(x))
        if entry is None:
            entry = self._changed[id(x)] = x, self._new(x)
        return entry[1]

    def _new(self, x: Any) -> Any:  # noqa: ANN401
        if not isinstance(x, Tensor):
            self.late = True
            return x.pin_memory()
        if type(x) is not Tensor or x.layout is not torch.strided or x.requires_grad or x.is_quantized:
            self.late = True
            return x
        x = x.resolve_conj().resolve_neg()
        into = torch.empty_like(x, device=self._device)
        if into.stride() != x.stride():  # it overlaps itself, or has gaps
            x = torch.empty_like(x, device=x.device).copy_(x)
        self.copies.append((into, x))
        return into


def _flat(t: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of memory."""
    return t.as_strided((t.numel(),), (1,))

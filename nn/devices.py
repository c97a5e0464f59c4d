"""Parameters on CUDA devices: what a net queues there, in which order, with no host that waits for it.

Backward runs on streams of its own choice, and in threads of its own: autograd has one for each device. A bucket that
is full is handed over by an event: its reduction waits for that alone, not for what backward queues behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from aiodist.handles import Progress
from aiodist.streams import Events, OnStream, lend


def cuda_devices(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the CUDA devices on which `tensors` lie, in the order in which they come first."""
    return list(dict.fromkeys(t.device for t in tensors if t.is_cuda))


def placement(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return which tensors are on CUDA devices, by the order of the devices: their numbers differ by rank.

    >>> placement([("weight", torch.ones(3))])
    'all on the CPU'
    """
    places: dict[torch.device, list[str]] = {}
    for name, t in named:
        if t.is_cuda:
            places.setdefault(t.device, []).append(name)
    said = [f"on CUDA device {i} of the module: {', '.join(names)}" for i, names in enumerate(places.values())]
    return "; ".join(said) or "all on the CPU"


class Devices:
    """The CUDA devices on which parameters of a net lie; it is false where all lie on the CPU.

    `came`, `filled` belong to the thread in which a hook runs, `lend`, `behind` and `time` to the loop, `follow` to the
    thread that computes.
    """

    def __init__(self, progress: Progress, parameters: Iterable[Tensor]) -> None:
        self._progress = progress
        self._issuing = {device: torch.cuda.Stream(device=device) for device in cuda_devices(parameters)}
        """By device: the stream from which reductions are issued; all it ever does is wait."""
        self._events: Events | None = Events.of(progress) if self._issuing else None
        self._gradients: dict[torch.device, list[torch.cuda.Stream]] = {device: [] for device in self._issuing}
        """The streams on which gradients came."""
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        """The streams on which the compute thread worked last."""
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._issuing)

    def follow(self) -> None:
        """Let what is queued here now come behind what the compute thread has queued, on any stream.

        Raises RuntimeError where a device is lost.
        """
        for device in self._issuing:
            current = torch.cuda.current_stream(device)
            last = self._last.get(device, current)
            if last != current or device not in self._last:
                # The first time too: an event gives the thread a context of the device. Asking for streams gives it
                # none, and cuBLAS warns where it is missing.
                self._order(current, last)
            self._last[device] = current

    def lend(self, values: object) -> None:
        """Keep the memory of tensors in `values` from being reused before the current streams have used it."""
        for device in self._issuing:
            lend(values, torch.cuda.current_stream(device))

    def came(self, device: torch.device) -> None:
        """A gradient came on the current stream."""
        current = torch.cuda.current_stream(device)
        streams = self._gradients[device]
        if current not in streams:
            with self._lock:
                streams.append(current)

    def gather(self, device: torch.device, gradients: Iterable[Tensor]) -> None:
        """Let the current stream wait for the streams that may have made `gradients`, which it uses."""
        current = torch.cuda.current_stream(device)
        others = [stream for stream in self._gradients[device] if stream != current]
        for other in others:
            self._order(current, other)
        if others:
            for gradient in gradients:
                gradient.record_stream(current)

    def filled(self, device: torch.device) -> torch.cuda.Event:
        """Return an event after the queued work of the current stream, with which a bucket is full."""
        assert self._events is not None
        return self._events.record(torch.cuda.current_stream(device))

    @contextmanager
    def behind(self, device: torch.device, event: torch.cuda.Event) -> Iterator[torch.cuda.Stream]:
        """Let work of this block wait for `event`, of `filled`, and for no later work."""
        assert self._events is not None
        stream = self._issuing[device]
        stream.wait_event(event)
        self._events.release(stream.device_index, event)
        with OnStream(stream):
            yield stream

    def time(self, stream: torch.cuda.Stream, then: Callable[[float], None]) -> None:
        """Call `then` soon with the end of the queued work of `stream`, in seconds of `perf_counter`."""

        def over(error: BaseException | None) -> None:
            then(perf_counter())

        def watch() -> None:
            assert self._events is not None
            try:
                self._events.watch(stream, over)
            except RuntimeError as error:  # the device is lost, which what is to be reduced on it tells
                over(error)

        self._progress.start(watch)

    def currents(self) -> list[torch.cuda.Stream]:
        return [torch.cuda.current_stream(device) for device in self._issuing]

    def _order(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        assert self._events is not None
        event = self._events.record(other)
        stream.wait_event(event)
        self._events.release(stream.device_index, event)

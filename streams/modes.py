"""Torch's modes, carried between threads and tasks.

The module carries grad mode, inference mode, autocast (on or off, dtype, cache), the default device together with every
other function mode (`torch.overrides.TorchFunctionMode`), and the current CUDA device with the current stream of each
device. Saved-tensor hooks and Python dispatch modes stay.

[Note: modes are absolute] `torch.no_grad()`, autocast and `inference_mode` restore exactly the modes that they found.
So blocks of different tasks may overlap in any way if each task finds the modes that it left.

[Note: inference mode] Only a guard sets inference mode. The end of the guard restores grad mode, inference mode and the
dispatch keys. To leave inference mode while a task is suspended, open a guard that switches the mode off. To continue
the task, end that guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import _GLOBAL_DEVICE_CONTEXT as _default_device
from torch._C import _get_function_stack_at as _function_at
from torch._C import _InferenceMode, _set_grad_enabled
from torch._C import _is_any_autocast_enabled as _any_autocast
from torch._C import _len_torch_function_stack as _functions
from torch._C import _pop_torch_function_stack as _pop_function
from torch._C import _push_on_torch_function_stack as _push_function
from torch.utils import _device

from aiodist.streams.current import device_index, stream_key

_AUTOCAST_DEVICES = ("cpu", "cuda")

_grad = torch.is_grad_enabled
_inference = torch.is_inference_mode_enabled
# The depth of autocast blocks, which has no getter. A block with enabled=False counts, since it changes the dtype.
_deeper = torch.autocast_increment_nesting
_back = torch.autocast_decrement_nesting


Place = tuple[int, tuple[torch.cuda.Stream, ...]]
"""The current CUDA device, and the current stream of each device."""


def _place() -> Place | None:
    """Return the place of this thread's CUDA work, or None for torch's default place or without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    device, count = device_index(), range(torch.cuda.device_count())
    if not device and not any(stream_key(index)[0] for index in count):
        return None  # objects for the streams would take ten times as long
    return device, tuple(map(torch.cuda.current_stream, count))


def _go_to(place: Place | None) -> None:
    device, streams = place or (0, tuple(map(torch.cuda.default_stream, range(torch.cuda.device_count()))))
    for stream in streams:
        if torch.cuda.current_stream(stream.device_index) != stream:
            torch.cuda.set_stream(stream)
    torch.cuda._maybe_exchange_device(device)  # unlike `set_device` it opens no context on a device that has none


def plain() -> bool:
    """Return True if this thread has torch's initial modes; costs 0.3 us."""
    return (
        _grad()
        and not _inference()
        and not _any_autocast()
        and not _functions()
        and _deeper() + _back() == 1
        and (not torch.cuda.is_initialized() or _place() is None)
    )


class Autocast(NamedTuple):
    """The state of `torch.autocast`, on each of `_AUTOCAST_DEVICES`."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    depth: int

    @classmethod
    def capture(cls) -> Autocast:
        """Return this thread's state."""
        enabled = tuple([torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES])
        dtypes = tuple([torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES])
        _deeper()
        return cls(enabled, dtypes, torch.is_autocast_cache_enabled(), _back())

    def apply(self) -> None:
        """Set this thread's state."""
        depth = _deeper() - 1
        _back()
        if depth:
            # No task may use the casts of another one, since the weights may change in between.
            torch.clear_autocast_cache()
        for device, enabled, dtype in zip(_AUTOCAST_DEVICES, self.enabled, self.dtypes, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        for _ in range(self.depth - depth):
            _deeper()
        for _ in range(depth - self.depth):
            _back()


class Modes(NamedTuple):
    """The modes of one thread at one moment."""

    grad: bool
    inference: bool
    autocast: Autocast
    functions: tuple[Any, ...]  # the stack of function modes, outermost first; a default device is a function mode
    default_device: Any  # the context that torch.set_default_device entered, or None
    traced_device: torch.device | None  # the default device for torch.compile, one for the process
    place: Place | None
    simple: bool  # True if only grad mode and place may differ from torch's; equal ones are the same object

    @classmethod
    def capture(cls) -> Modes:
        """Return the modes of the calling thread."""
        if not (_inference() or _any_autocast() or _functions()) and _deeper() + _back() == 1:
            cpu, cuda = _AUTOCAST_DEVICES
            return _simple_modes(
                _grad(),
                torch.get_autocast_dtype(cpu),
                torch.get_autocast_dtype(cuda),
                torch.is_autocast_cache_enabled(),
                _place(),
            )
        return cls(
            _grad(),
            _inference(),
            Autocast.capture(),
            tuple([_function_at(i) for i in range(_functions())]),
            getattr(_default_device, "device_context", None),
            _device.CURRENT_DEVICE,
            _place(),
            simple=False,
        )

    def in_force(self) -> bool:
        """Return True if the calling thread has these modes, but for the autocast dtype without an autocast block."""
        if _grad() is not self.grad or _inference() is not self.inference or _functions() != len(self.functions):
            return False
        if _any_autocast() or _deeper() + _back() != 1:
            if Autocast.capture() != self.autocast:
                return False
        elif self.autocast.depth or True in self.autocast.enabled:
            return False
        if _place() != self.place:
            return False
        return all(mode is _function_at(i) for i, mode in enumerate(self.functions))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a block with these modes, which the block may change."""
        switch = ModeSwitch(self)
        switch.enter()
        try:
            yield
        finally:
            switch.leave(last=True)

    def apply(self, now: Modes, *, all_of_it: bool) -> None:
        """Change the modes from `now` to these, except inference mode.

        True for `all_of_it` sets grad mode and autocast anyway, since a guard has changed them.
        """
        _set_grad_enabled(self.grad)
        if all_of_it or now.autocast != self.autocast:
            self.autocast.apply()
        if now.functions != self.functions:
            for _ in now.functions:
                _pop_function()
            for mode in self.functions:
                _push_function(mode)
            _device.CURRENT_DEVICE = self.traced_device
        if now.default_device is not self.default_device:
            _default_device.device_context = self.default_device
        if now.place != self.place:
            _go_to(self.place)


@lru_cache(maxsize=64)
def _simple_modes(grad: bool, cpu: torch.dtype, cuda: torch.dtype, cache: bool, place: Place | None) -> Modes:
    return Modes(
        grad=grad,
        inference=False,
        autocast=Autocast((False, False), (cpu, cuda), cache, 0),
        functions=(),
        default_device=None,
        traced_device=None,
        place=place,
        simple=True,
    )


class ModeSwitch:
    """The modes of one activity on a shared thread. `enter` and `leave` surround each part of the activity.

    `mine` are the modes at the end of the last part, and `outside` the thread's modes around that part.
    """

    __slots__ = ("_ended", "_opened", "mine", "outside")

    def __init__(self, mine: Modes, outside: Modes | None = None) -> None:
        self.mine = mine
        self.outside = outside or mine
        self._opened: list[Any] = []  # guards to end after the activity
        self._ended: Any = None  # the guard to end when the activity continues

    def enter(self) -> None:
        """Set the modes `mine`."""
        mine, outside = self.mine, self.outside
        if not outside.in_force():
            outside = self.outside = Modes.capture()
        guarded = True
        if self._ended is not None:
            self._ended.__exit__(None, None, None)
            self._ended = None
        elif mine.inference is not outside.inference:
            self._opened.append(_guard(mine.inference))
        else:
            guarded = False
        if guarded or mine is not outside:
            mine.apply(outside, all_of_it=guarded)

    def leave(self, *, last: bool = False) -> bool:
        """Set the modes `outside`. Return True if they are torch's initial modes, as `mine` are."""
        mine, outside = self.mine, self.outside
        if not mine.in_force():
            mine = Modes.capture()
            self.mine = mine = outside if mine == outside else mine
        guarded = last and bool(self._opened)
        while last and self._opened:
            self._opened.pop().__exit__(None, None, None)
        if _inference() is not outside.inference:
            guarded = True
            self._ended = _guard(outside.inference)
            if last:
                _never_ended.append(self._ended)
        if guarded or mine is not outside:
            outside.apply(mine, all_of_it=guarded)
        return mine is outside and mine.simple and mine.grad and mine.place is None


# Guards of activities that ended in an inference mode of other code. The end of such a guard, as by the garbage
# collector, would restore that mode.
_never_ended: list[Any] = []


def _guard(inference: bool) -> Any:  # noqa: ANN401
    guard = _InferenceMode(inference)
    guard.__enter__()
    return guard

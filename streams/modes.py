"""Torch's modes belong to a thread; this module carries them between threads and tasks.

Carried are grad mode, inference mode, autocast (on or off, dtype, cache), the default device together with every
other function mode (`torch.overrides.TorchFunctionMode`), and the current CUDA device with the current stream of each
device. Saved-tensor hooks and Python dispatch modes are not.

[Note: modes are absolute] `torch.no_grad()`, autocast and `inference_mode` remember what they find and put exactly
that back. So blocks of different tasks may overlap in any way, as long as each task finds, whenever it runs, the
modes that it left.

[Note: inference mode] Nothing sets it but a guard that, when it ends, puts grad mode, inference mode and the
dispatch keys back as it found them. To leave inference mode while a task is suspended, open a guard that switches
it off; to go on, end that guard.
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
# The depth of autocast blocks, which has no getter. A block with enabled=False counts: it changes the dtype.
_deeper = torch.autocast_increment_nesting
_back = torch.autocast_decrement_nesting


Place = tuple[int, tuple[torch.cuda.Stream, ...]]
"""The current CUDA device, and of each device the current stream; see `_place`."""


def _place() -> Place | None:
    """Return where this thread's CUDA work goes, None where that is where torch starts: nothing is set, or no CUDA."""
    if not torch.cuda.is_initialized():
        return None
    device, count = device_index(), range(torch.cuda.device_count())
    if not device and not any(stream_key(index)[0] for index in count):
        return None  # asked so, it costs a tenth of what objects for the streams do
    return device, tuple(map(torch.cuda.current_stream, count))


def _go_to(place: Place | None) -> None:
    device, streams = place or (0, tuple(map(torch.cuda.default_stream, range(torch.cuda.device_count()))))
    for stream in streams:
        if torch.cuda.current_stream(stream.device_index) != stream:
            torch.cuda.set_stream(stream)
    torch.cuda._maybe_exchange_device(device)  # unlike `set_device` it opens no context on a device that has none


def plain() -> bool:
    """Return True when this thread's modes are those that torch starts with; costs 0.3 us."""
    return (
        _grad()
        and not _inference()
        and not _any_autocast()
        and not _functions()
        and _deeper() + _back() == 1
        and _place() is None
    )


class Autocast(NamedTuple):
    """What `torch.autocast` changes, on each of `_AUTOCAST_DEVICES`."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    depth: int

    @classmethod
    def capture(cls) -> Autocast:
        """Return what this thread has."""
        enabled = tuple([torch.is_autocast_enabled(device) for device in _AUTOCAST_DEVICES])
        dtypes = tuple([torch.get_autocast_dtype(device) for device in _AUTOCAST_DEVICES])
        _deeper()
        return cls(enabled, dtypes, torch.is_autocast_cache_enabled(), _back())

    def apply(self) -> None:
        """Give it to this thread."""
        depth = _deeper() - 1
        _back()
        if depth:
            # What one task has cast must serve no other: the weights may change in between.
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
    functions: tuple[Any, ...]  # the stack of function modes, outermost first; a default device is one
    default_device: Any  # the context that torch.set_default_device entered, or None
    traced_device: torch.device | None  # the default device that torch.compile sees: one for the whole process
    place: Place | None
    simple: bool  # nothing but grad mode and a place, and such modes are always the same object

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
        """Return True when the calling thread has these modes; an autocast dtype with no autocast is not seen."""
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
        """Put these modes in force on this thread for a block, which may change them."""
        switch = ModeSwitch(self)
        switch.enter()
        try:
            yield
        finally:
            switch.leave(last=True)

    def apply(self, now: Modes, *, all_of_it: bool) -> None:
        """Change what differs from `now`, save inference mode; `all_of_it` when a guard has moved the rest."""
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
    """The modes of one activity on a thread that others use too: `enter` and `leave` surround each stretch of it.

    `mine` are its modes, as it left them at its last stretch; `outside` those of the thread around the last one.
    """

    __slots__ = ("_ended", "_opened", "mine", "outside")

    def __init__(self, mine: Modes, outside: Modes | None = None) -> None:
        self.mine = mine
        self.outside = outside or mine
        self._opened: list[Any] = []  # guards to end when the activity is over
        self._ended: Any = None  # the guard to end when it goes on

    def enter(self) -> None:
        """Put `mine` in force."""
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
        """Take `mine` down and put `outside` in force; return True when both are what torch starts with."""
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


# The guards of activities that ended inside an inference mode which somebody else will end: ending ours would bring
# that back, and a guard ends when it is collected.
_never_ended: list[Any] = []


def _guard(inference: bool) -> Any:  # noqa: ANN401
    guard = _InferenceMode(inference)
    guard.__enter__()
    return guard

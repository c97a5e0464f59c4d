"""Functions that are called at the events of a training, in order: the engine's own first, then the user's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from aiodist.engine.state import EVENTS, Event, State
from aiodist.handles import Progress

Hook = Callable[[State], object]
"""A plain function, or a coroutine function."""

_LOOK_SECONDS = 0.5  # how soon a thread notices that its loop is gone


class Hooks:
    """Hooks by event; those of `behind` come after all that are added here."""

    def __init__(self, behind: Hooks | None = None) -> None:
        self._hooks: dict[Event, list[Hook]] = {event: [] for event in EVENTS}
        self._behind = behind

    def add(self, event: Event, hook: Hook) -> None:
        """Call `hook` at `event`, after those that were added before.

        Raises ValueError for an event that there is not, TypeError for what cannot be called.
        """
        if event not in self._hooks:
            raise ValueError(f"event {event!r}: expected one of {', '.join(EVENTS)}")
        if not callable(hook):
            raise TypeError(f"the hook for {event!r} is {type(hook).__name__}: expected a function of the state")
        self._hooks[event].append(hook)

    def at(self, event: Event) -> list[Hook]:
        """Return the hooks of `event`, in order."""
        mine = self._hooks[event]
        return mine if self._behind is None else mine + self._behind.at(event)

    async def call(self, event: Event, state: State) -> None:
        """Call the hooks of `event` on the loop, and await what is to be awaited, one after the other."""
        for hook in self.at(event):
            result = hook(state)
            if inspect.isawaitable(result):
                await result

    def call_on_thread(self, event: Event, state: State, progress: Progress) -> None:
        """Call them on this thread, which computes; coroutines run on the loop, and this thread waits for them."""
        for hook in self.at(event):
            result = hook(state)
            if inspect.iscoroutine(result):
                with progress.waiting():
                    _run_on_loop(result, progress.loop)


def _run_on_loop(coroutine: Coroutine[Any, Any, object], loop: asyncio.AbstractEventLoop) -> None:
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    while not concurrent.futures.wait([future], _LOOK_SECONDS).done:
        if loop.is_closed():
            raise RuntimeError(f"the event loop was closed while {coroutine!r} was running")
    future.result()

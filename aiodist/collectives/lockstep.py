"""Runs the programs of several tensors together, step by step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiodist.backends.base import Done
from aiodist.handles.kernel import Nested, Program, Transfer, transfers

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Apart(Nested):
    """A nested program that is in lockstep with those of its key alone, of all that begin in the same step.

    Their messages must have tags of their own.
    """

    key: Hashable = None


@dataclass(eq=False, slots=True)
class Joint:
    """A call that is made as one with those of its key, which other programs in lockstep make in the same step."""

    key: Hashable
    items: Sequence[Any]
    start: Callable[[Sequence[Any], Done], None]

    def __call__(self, done: Done) -> None:
        """Make it."""
        self.start(self.items, done)


def _joined(calls: Sequence[Transfer]) -> list[Transfer]:
    """Return the calls, all joint ones of a key as one, and all programs of a key."""
    items: dict[Hashable, list[Any]] = {}
    apart: dict[Hashable, list[Program[None]]] = {}
    joined: list[Transfer] = []
    for call in calls:
        if isinstance(call, Apart):
            apart.setdefault(call.key, []).append(call.program)
        elif not isinstance(call, Joint):
            joined.append(call)
        elif call.key in items:
            items[call.key] += call.items
        else:
            items[call.key] = list(call.items)
            joined.append(Joint(call.key, items[call.key], call.start))
    return joined + [Nested(lockstep(programs)) for programs in apart.values()]


def meet(done: Done) -> None:
    """Do nothing: a step with this call alone is where programs in lockstep wait for one another.

    Some ranks take more steps than others to get there, and behind it all ranks make the same calls in one order.
    """
    done(None)


async def lockstep(programs: Sequence[Program[T]]) -> list[T]:
    """Run several programs side by side, their steps joined; the result is the list of their results.

    A step is over when all calls of it are. So programs that take other steps than one another, such as two schedules,
    have to be `Apart`: a rank would wait in the one for what another rank does behind a step of the other. Programs
    that take the same steps, each rank its own, may share a tag: their messages meet in order.
    """
    results: list[Any] = [None] * len(programs)
    active = dict(enumerate(programs))
    there: set[int] = set()
    try:
        while active:
            if there.issuperset(active):
                there.clear()
            calls: list[Transfer] = []
            for i, program in list(active.items()):
                if i in there:
                    continue
                try:
                    step = program.send(None)
                except StopIteration as stop:
                    results[i] = stop.value
                    del active[i]
                else:
                    there.update([i] if meet in step else [])
                    calls.extend(step)
            if active:
                await transfers(_joined(calls))
    finally:
        for program in active.values():
            program.close()
    return results

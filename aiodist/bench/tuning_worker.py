"""A rank of `aiodist tune`: measures, and on rank 0 writes the table.

Started as `python -m aiodist.bench.tuning_worker TUNING`, the tuning as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isqrt
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import aiodist
from aiodist.bench import collectives
from aiodist.bench.plan import carry_out
from aiodist.bench.timing import Contender, Pace, interleaved, pace
from aiodist.bench.tuning import Tuning
from aiodist.collectives.choice.availability import OfferState
from aiodist.collectives.choice.table import RangeEdit, bytes_text
from aiodist.collectives.choice.tablefile import conditions, render, tuned_path, write
from aiodist.communicator import parts_of

if TYPE_CHECKING:
    from aiodist.communicator import Communicator

Figures = Mapping[int, Mapping[str, float]]
"""Size in bytes, as the selector sees it -> implementation -> seconds."""

_SHORT_BYTES = 256 << 10
_HOPELESS = 3.0  # an implementation that takes 3 times as long as the best in the first samples is dropped
_CLEAR = 1.05  # factor by which an implementation must be faster than that of the size before


async def main(todo: Tuning) -> None:
    """Measure with the other ranks; rank 0 prints, and writes the file."""
    async with aiodist.init(selector="none") as coll:
        edits: list[RangeEdit] = []
        for operation in todo.operations:
            figures = {}
            for nbytes in todo.sizes:
                seen, seconds = await _measured(coll, operation, nbytes, todo.repeat)
                figures[seen] = seconds
                if coll.rank == 0:
                    ranked = sorted(seconds.items(), key=lambda item: item[1])
                    shown = ", ".join(f"{name} {1e6 * time:.4g} us" for name, time in ranked)
                    print(f"{operation} {bytes_text(nbytes)}: {shown}", flush=True)  # noqa: T201
            edits += edits_from(operation, parts_of(coll).repertoire.hosts, figures)
        if coll.rank == 0:
            _report(todo, coll, edits)


async def _measured(coll: Communicator, operation: str, nbytes: int, repeat: int) -> tuple[int, Mapping[str, float]]:
    """Return the size for the selector, and the seconds of each implementation on the slowest rank.

    The first few samples drop the implementations that are far too slow.
    """
    made = collectives.buffers(coll, operation, nbytes)
    overwrite = collectives.overwriting(made)

    async def seconds_of(
        names: Iterable[str], pace: Pace, figure: Callable[[Sequence[float]], float]
    ) -> dict[str, float]:
        contenders = [
            Contender(name, collectives.ours(coll, operation, made, {"impl": name}), awaited=True, overwrite=overwrite)
            for name in names
        ]
        samples = await interleaved(contenders, coll.barrier, pace)
        everywhere = await coll.allgather_object({name: figure(times) for name, times in samples.items()})
        return {name: max(one[name] for one in everywhere) for name in samples}

    known = [
        offer.impl
        for offer in coll.availability()
        if (offer.operation, offer.device, offer.state) == (operation, "cpu", OfferState.AVAILABLE)
        and not (operation == "allgather" and offer.impl == coll.backend)  # two steps, which no library carries
    ]
    first = await seconds_of(known, Pace(min(repeat, 5), 4 if made.t.nbytes < _SHORT_BYTES else 1, warmups=2), min)
    hopeful = [name for name, took in first.items() if took <= _HOPELESS * min(first.values())]
    batch = max(1, pace(made.t.nbytes, repeat).batch * repeat // 60)
    seconds = await seconds_of(hopeful, Pace(repeat, batch, warmups=2), median)
    whole = made.out if operation == "allgather" and made.out is not None else made.t
    return whole.nbytes, seconds


def best_of(figures: Figures) -> list[tuple[int, str]]:
    """Return the steps of the table: bytes from which an implementation is the best, and its name.

    An implementation that is hardly better than that of the size below is skipped. A step starts halfway between two
    sizes, on a logarithmic scale.

    >>> best_of({64: {"mpi": 1.0, "shm": 2.0}, 1024: {"mpi": 1.02, "shm": 1.0}, 4096: {"mpi": 9.0, "shm": 3.0}})
    [(0, 'mpi'), (2048, 'shm')]
    """
    steps: list[tuple[int, str]] = []
    before = 0
    for nbytes, seconds in sorted(figures.items()):
        best = min(seconds, key=lambda name: seconds[name])
        last = steps[-1][1] if steps else None
        if last is None:
            steps.append((0, best))
        elif last != best and seconds.get(last, float("inf")) > _CLEAR * seconds[best]:
            steps.append((isqrt(before * nbytes), best))
        before = nbytes
    return steps


def edits_from(operation: str, hosts: str, figures: Figures) -> list[RangeEdit]:
    """Return the rows of the table for `operation`."""
    steps = best_of(figures)
    ends = [start for start, _ in steps[1:]]
    return [
        RangeEdit("cpu", hosts, operation, start, end, name)
        for (start, name), end in zip(steps, [*ends, None], strict=True)
    ]


def _report(todo: Tuning, coll: Communicator, edits: Sequence[RangeEdit]) -> None:
    here = conditions(parts_of(coll).repertoire, coll.topology)
    text = render(edits, here, "What runs an operation of which size, as aiodist tune measured it.")
    path = tuned_path(here) if todo.output is None else Path(todo.output)
    print(text, end="", flush=True)  # noqa: T201  - before it is written, which may fail
    if todo.dry:
        print(f"# not written: --dry-run; it would go to {path}")  # noqa: T201
        return
    write(path, text)
    used = "the next start here uses it" if todo.output is None else f"AIODIST_SELECTOR={path} uses it"
    print(f"# written to {path}: {used}", flush=True)  # noqa: T201


if __name__ == "__main__":
    carry_out(lambda text: aiodist.run(main, Tuning.from_json(text)))

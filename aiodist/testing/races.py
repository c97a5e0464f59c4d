"""Races: results of a program that differ by seed, and the first receive from `ANY` that took another message."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from reprlib import Repr
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch

from aiodist.communicator.messenger import Receiving
from aiodist.streams.memory import bytes_of
from aiodist.types import ANY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiodist.collectives.messages import Arrived
    from aiodist.communicator.operation import CommunicatorOperation

T = TypeVar("T")

_short = Repr()
_short.maxstring = _short.maxlong = _short.maxother = 200
_NO_RECEIVE = (
    "Each receive from ANY took the same messages. Other causes are the order in which handles finish, a parameter "
    "server, or what the ranks of this process share, such as the generator of torch."
)
_UNSTEADY = (
    "The program reads something that no seed fixes: time, addresses, threads, or state that is left of the last run."
)


class RaceError(AssertionError):
    """Results of a program differ by seed."""

    def __init__(self, message: str, seeds: tuple[int, int]) -> None:
        super().__init__(message)
        self.seeds = seeds
        """Two seeds with different results."""


class TakenMessage(NamedTuple):
    """A message that a receive from `ANY` took."""

    rank: int
    comm: str
    call: str
    """Name and line of the receive."""
    source: int
    tag: int

    @property
    def at_line(self) -> TakenMessage:
        """The receive without the message."""
        return self._replace(source=ANY, tag=ANY)


class _Bits(NamedTuple):
    """The bits of a tensor or an array."""

    dtype: object
    shape: tuple[int, ...]
    data: bytes


class ResultPart(NamedTuple):
    """A part of a result."""

    value: object
    text: str


@dataclass(frozen=True)
class SeededRun:
    """A run of the program."""

    seed: int
    parts: dict[str, ResultPart] = field(default_factory=dict)
    """The parts of the results, by path."""
    taken: list[TakenMessage] = field(default_factory=list)


def same_results(run: Callable[[int], list[T]], seeds: Iterable[int]) -> list[T]:
    """Run a program with each seed. Return the results of the first seed, or raise `RaceError` if others differ."""
    first: SeededRun | None = None
    results: list[T] = []
    start = _generators()
    for seed in seeds:
        start()
        now = SeededRun(seed)
        try:
            came = _observed(run, now)
        except BaseException as error:
            error.add_note(f"run_ranks(…, seeds=[{seed}]) raises it again")
            if first is not None:
                error.add_note(f"seed {first.seed} raises nothing. {_parting(first, now)}")
            raise
        if first is None:
            first, results = now, came
        elif (path := _difference(first, now)) is not None:
            start()
            _observed(run, again := SeededRun(seed))
            raise _race(first, now, path, steady=_difference(now, again) is None)
    if first is None:
        raise ValueError("seeds is empty: expected at least one seed")
    return results


def _observed(run: Callable[[int], list[T]], into: SeededRun) -> list[T]:
    """Run a program, and record the run."""
    with _recorded(into.taken):
        results = run(into.seed)
    _add_parts(into.parts, "results", results, ())
    return results


def _race(one: SeededRun, other: SeededRun, path: str, *, steady: bool) -> RaceError:
    """Return the error for results that differ at `path`. `steady` is True if a second run with a seed is equal."""
    whole = path[: path.find("]") + 1] or path
    texts = zip((one, other), _texts(one.parts[path], other.parts[path]), strict=True)
    shown = [
        f"  seed {run.seed}: {text}" + (f" in {run.parts[whole].text}" if whole != path else "") for run, text in texts
    ]
    why = _parting(one, other) if steady else f"Two runs with seed {other.seed} differ too. {_UNSTEADY}"
    lines = [f"{path} differs by seed", *shown, why, f"run_ranks(…, seeds=[{one.seed}, {other.seed}]) runs both again"]
    return RaceError("\n".join(lines), (one.seed, other.seed))


def _parting(one: SeededRun, other: SeededRun) -> str:
    """Return the first receive from `ANY` that took another message, as sentences."""
    of_line: defaultdict[TakenMessage, list[TakenMessage]] = defaultdict(list)
    for take in one.taken:
        of_line[take.at_line].append(take)
    counts: Counter[TakenMessage] = Counter()
    for take in other.taken:
        line = take.at_line
        number, counts[line] = counts[line], counts[line] + 1
        before = of_line[line][number] if number < len(of_line[line]) else None
        if before != take:
            which = f"Message {number + 1} of {take.call} from ANY, on rank {take.rank} of {take.comm!r}, differs first"
            was = "there is none" if before is None else f"rank {before.source} sent it, with tag {before.tag}"
            return f"""{which}:
  seed {one.seed}: {was}
  seed {other.seed}: rank {take.source} sent it, with tag {take.tag}
Receive from a rank by its number, or make the result independent of the order."""
    return _NO_RECEIVE


@contextmanager
def _recorded(taken: list[TakenMessage]) -> Iterator[None]:
    """Record in the block the messages that receives from `ANY` take."""
    finish = Receiving.finish

    def recording(
        receiving: Receiving, operation: CommunicatorOperation, arrived: Arrived | None, error: BaseException | None
    ) -> None:
        if arrived is not None and receiving.peer.src == ANY and operation.given_back is None:
            dispatcher = receiving.dispatcher
            rank = dispatcher.ranks[dispatcher.transport.rank]
            taken.append(TakenMessage(rank, dispatcher.name, receiving.call, arrived.source, arrived.tag))
        finish(receiving, operation, arrived, error)

    setattr(Receiving, "finish", recording)  # noqa: B010  - mypy refuses the assignment
    try:
        yield
    finally:
        setattr(Receiving, "finish", finish)  # noqa: B010


def _generators() -> Callable[[], None]:
    """Return a function that sets the generators of random numbers as they are now."""
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)

    return restore


# --- comparison --------------------------------------------------------------------------------------------


def _add_parts(parts: dict[str, ResultPart], path: str, result: object, around: tuple[int, ...]) -> None:
    """Add the parts of a result to `parts`, the whole before its parts.

    `around` are the numbers of the objects that have this one as a part.
    """
    items = {} if id(result) in around else _items(result)
    value = _value(result) if items is None else frozenset(items)
    parts[path] = ResultPart((type(result).__qualname__, value), " ".join(_short.repr(result).split()))
    for name, one in (items or {}).items():
        _add_parts(parts, f"{path}{name}", one, (*around, id(result)))


def _items(result: Any) -> dict[str, object] | None:  # noqa: ANN401
    """Return the items of a container by their paths, or None for another object."""
    match result:
        case torch.nn.Module():
            return {f".{name}": one for name, one in result.state_dict().items()}
        case Mapping():
            return {f"[{key!r}]": one for key, one in result.items()}
        case list() | tuple() | deque() | np.ndarray(dtype=np.dtype(hasobject=True)):
            return {f"[{i}]": one for i, one in enumerate(result)}
        case BaseException():
            return {".args": result.args}
        case _ if is_dataclass(result) and not isinstance(result, type):
            return {f".{one.name}": getattr(result, one.name) for one in fields(result)}
    return None


def _value(result: Any) -> object:  # noqa: ANN401
    """Return a value to compare by: the bits of a tensor, an array or a float; None for an object without equality."""
    match result:
        case torch.Tensor():
            dense = result.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
            return _Bits(dense.dtype, tuple(dense.shape), bytes(bytes_of(dense).numpy()))
        case np.ndarray() | np.generic():
            return _Bits(result.dtype.str, result.shape, result.tobytes())
        case float() | complex():
            return result.real.hex(), result.imag.hex()
        case Enum():
            return result.name
        case set():
            return frozenset(result)
    has_equality = any("__eq__" in vars(base) for base in type(result).__mro__[:-1]) and not callable(result)
    return result if has_equality and (result == result) is True else None


def _difference(one: SeededRun, other: SeededRun) -> str | None:
    """Return the path of the first part that differs. The whole is before its parts."""
    return next((path for path, part in one.parts.items() if other.parts[path].value != part.value), None)


def _texts(one: ResultPart, other: ResultPart) -> tuple[str, str]:
    """Return the texts of two parts that differ, of large tensors those of the first element that differs."""
    match one.value, other.value:
        case (_, _Bits(torch.dtype() as dtype, shape, a)), (_, _Bits(same, alike, b)) if one.text == other.text and (
            same,
            alike,
        ) == (dtype, shape):
            differ = np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)
            at = int(differ.argmax()) // dtype.itemsize
            where = [int(i) for i in np.unravel_index(at, shape)]
            texts = [torch.frombuffer(bytearray(data), dtype=dtype)[at].item() for data in (a, b)]
            return f"element {where} is {texts[0]}", f"element {where} is {texts[1]}"
    return one.text, other.text

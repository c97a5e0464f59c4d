"""The exchange about a pass in addition to gradients: its status, one small sum, and accounts after a failure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

from aiodist.control import disagreement
from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.nn.hyperparameters import Lines, different
from aiodist.world.tracebacks import cause_in

_NAMES = 5  # that a message lists
_ROWS = 5  # of numbers of each rank
LEFT_OVER = float(1 << 20)
"""In the column of a frozen parameter that has a gradient all the same: of before, when it was trained."""


class StatusKind(IntEnum):
    """The meaning of a rank's status. All have the same shape, so ranks with different meanings meet."""

    END = 0
    """Backward has ended."""
    ASK = 1
    """Before backward: this rank trains other parameters than before. Do the others?"""
    JOIN = 2
    """The same in a `join` block, where every pass begins so: ranks that have ended cannot know by themselves."""
    CLOSE = 3
    """This rank makes no more steps."""
    AVERAGE = 4
    """This rank is about to average parameters, and reduces no gradients."""


_KINDS = tuple(StatusKind)


@dataclass(frozen=True)
class PassStatus:
    """The status of a pass, summed over all ranks."""

    columns: Sequence[float]
    """By parameter: at the end of a pass, how many ranks had a gradient; before it, how many train it."""
    failures: tuple[int, ...]
    """The ranks that failed."""
    active: int
    """How many ranks brought data."""
    issued: int
    """How many buckets the rank that is farthest has issued."""
    steps: tuple[int | None, ...]
    """By rank: the mark of the steps that its optimizer has made; None if the rank brings nothing."""
    kinds: tuple[StatusKind, ...]
    """By rank."""
    stops: int = 0
    """Number of ranks that ask all to stop after this pass."""
    alike: bool = True
    """True if the parameters of all ranks are those after the same steps and loads."""
    same_settings: bool = True
    """True if the ranks that send settings of their steps have the same."""

    @staticmethod
    def pack(  # noqa: PLR0913  - one for each column
        columns: Iterable[float],
        ranks: int,
        rank: int,
        *,
        kind: StatusKind = StatusKind.END,
        failed: bool = False,
        steps: int | None = None,
        issued: int = 0,
        stop: bool = False,
        settings: int = 0,
    ) -> Tensor:
        """Return the status of one rank, to be added to the others'; `steps` is None where it brings nothing."""
        by_rank = [0.0] * (_ROWS * ranks)
        made = 0.0 if steps is None else steps + 1.0
        by_rank[rank::ranks] = float(issued), float(failed), made, float(kind), float(settings)
        told = [*columns, float(steps is not None), float(stop), *by_rank]
        return torch.frombuffer(array("d", told), dtype=torch.float64)  # `torch.tensor` takes 30 us

    @classmethod
    def unpack(cls, status: Tensor, ranks: int) -> Self:
        """Return what the sum over all ranks says.

        >>> status = PassStatus.unpack(PassStatus.pack([1.0, 0.0], 1, 0, issued=3, steps=7, stop=True), 1)
        >>> status.columns, status.failures, status.active, status.issued, status.steps, status.kinds, status.stops
        ([1.0, 0.0], (), 1, 3, (7,), (<StatusKind.END: 0>,), 1)
        """
        values = status.tolist()
        end = len(values) - _ROWS * ranks - 2
        columns, active, stops = values[:end], values[end], values[end + 1]
        issued, failed, steps, kinds, settings = [values[i : i + ranks] for i in range(end + 2, len(values), ranks)]
        return cls(
            columns=columns,
            failures=tuple([r for r, told in enumerate(failed) if told]),
            active=round(active),
            issued=round(max(issued)),
            steps=tuple([round(count) - 1 if count else None for count in steps]),
            kinds=tuple([_KINDS[int(kind)] for kind in kinds]),
            stops=round(stops),
            alike=len({*steps} - {0.0}) < 2,
            same_settings=len({*settings} - {0.0}) < 2,
        )

    def all_are(self, kind: StatusKind) -> bool:
        return all(k is kind for k in self.kinds)

    def agreed(self, kind: StatusKind) -> bool:
        """Return whether all ranks mean this, train the same parameters, and these are alike."""
        return self.all_are(kind) and self.alike and self.same_settings and self.wanted() is not None

    @property
    def sound(self) -> bool:
        """True if no rank failed, and all end the same pass, after the same steps, with the same settings."""
        return not self.failures and not any(self.kinds) and self.alike and self.same_settings

    def wanted(self) -> tuple[list[bool], list[bool]] | None:
        """Return which parameters are trained, and which are to be reduced; None where ranks disagree.

        A frozen one is reduced too where a rank has a gradient of it.

        >>> asked = PassStatus([2.0, 0.0, LEFT_OVER], (), 2, 0, (0, 0), (StatusKind.ASK, StatusKind.ASK))
        >>> asked.wanted()
        ([True, False, False], [True, False, True])
        """
        counts = [divmod(value, LEFT_OVER) for value in self.columns]
        if any(trained not in (0.0, self.active) for _, trained in counts):
            return None
        return [bool(trained) for _, trained in counts], [bool(left or trained) for left, trained in counts]


# --- words ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassAccount:
    """The account of one rank."""

    failure: str | None
    """Traceback of the error of forward or backward, or None."""
    frozen: tuple[str, ...] | None
    """The parameters that it does not train; None where it brings nothing."""
    passes: int
    """Number of finished backwards."""
    steps: str
    """How many steps its optimizer has made, in words."""
    settings: Lines | None = None
    """The settings of its step; None if it brings nothing."""


def explained(status: PassStatus, accounts: Sequence[PassAccount], rank: int) -> AiodistError:
    """Return the error of a pass that was not sound; the same on every rank."""
    if StatusKind.CLOSE in status.kinds:
        return MismatchError(_ended(status, accounts), rank=rank)
    failed = [r for r, account in enumerate(accounts) if account.failure is not None]
    if failed:
        return _failed(failed, accounts[failed[0]].failure or "", rank)
    if StatusKind.AVERAGE in status.kinds and not status.all_are(StatusKind.AVERAGE):
        averaging = [kind is StatusKind.AVERAGE for kind in status.kinds]
        known = ["averages parameters" if average else "reduces gradients" for average in averaging]
        text = disagreement("this step", known)
        return MismatchError(f"{text}; every rank must make as many, with a LocalSGD of the same `every`", rank=rank)
    frozen = [account.frozen for account in accounts]
    if len({names for names in frozen if names is not None}) > 1:
        return MismatchError(_frozen(frozen), rank=rank)
    if status.alike and not status.same_settings:
        return MismatchError(_settings([account.settings for account in accounts]), rank=rank)
    if status.alike:
        return MismatchError(
            "ranks disagree on the gradients to reduce: a frozen parameter has a gradient on some ranks only; "
            "`net.zero_grad()` removes it",
            rank=rank,
        )
    known = ["nothing" if made is None else account.steps for made, account in zip(status.steps, accounts, strict=True)]
    return MismatchError(
        f"{disagreement('the steps and loads of their parameters', known)}; a rank that alone raises in or before "
        "`opt.step()`, or skips it, stays behind, and so does one that alone calls `net.load_state_dict`; no rank "
        "makes another step before every rank has loaded the same state, `net.load_state_dict(...)`, and that of its "
        "optimizer",
        rank=rank,
    )


def _failed(failed: Sequence[int], text: str, rank: int) -> RemoteError:
    first, *others = failed
    cause = cause_in(text)
    also = f" (and {', '.join(f'rank {r}' for r in others)})" if others else ""
    return RemoteError(f"rank {first}{also} failed in this step: {cause}", raised_by=first, traceback=text, rank=rank)


def _ended(status: PassStatus, accounts: Sequence[PassAccount]) -> str:
    by_kind = zip(status.kinds, accounts, strict=True)
    known = [
        f"closes the net after {account.passes} steps"
        if kind is StatusKind.CLOSE
        else f"is in step {account.passes + 1}"
        for kind, account in by_kind
    ]
    return (
        f"{disagreement('the number of steps', known)}; every rank must make as many; if the data of a rank end early, "
        "let it wait for the others by `async with net.join():` around the loop"
    )


def _frozen(frozen: Sequence[tuple[str, ...] | None]) -> str:
    known = [set(names) for names in frozen if names is not None]
    names = sorted(set[str]().union(*known).difference(known[0].intersection(*known)))

    def said(mine: tuple[str, ...] | None) -> str:
        if mine is None:
            return "no data left"
        here = [repr(name) for name in names if name in mine]
        more = f" and {len(here) - _NAMES} more" if len(here) > _NAMES else ""
        return f"{', '.join(here[:_NAMES])}{more} frozen" if here else f"{names[0]!r} trained"

    return (
        f"{disagreement('the trained parameters', [said(mine) for mine in frozen])}; no rank has made this step, and "
        "the next one works once all freeze the same"
    )


def _settings(by_rank: Sequence[Lines | None]) -> str:
    name, values = different(by_rank) or ("optimizers", ["other ones"] * len(by_rank))
    return (
        f"{disagreement(f'the settings of this step, {name}', values)}; every rank must have the same clipping, "
        "scaler, autocast, optimizer and hyperparameters (lr, …). No rank has made this step, and the next one works "
        "once all have the same"
    )


def some_in_join(status: PassStatus) -> str:
    """Return what is wrong where some ranks are in a `join` block, and some are not."""
    known = ["inside" if kind is StatusKind.JOIN else "outside" for kind in status.kinds]
    return f"{disagreement('net.join()', known)}; every rank must enter and leave it with the others; this net fails"

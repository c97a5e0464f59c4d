"""Accounts: what ranks tell each other, as words, once the pass status has shown that a pass cannot count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiodist.errors import AiodistError, MismatchError, RemoteError
from aiodist.nn.layout import in_words
from aiodist.nn.pass_status import PassStatus, StatusKind
from aiodist.world.tracebacks import cause_in

_NAMES = 5  # that a message lists


@dataclass(frozen=True)
class PassAccount:
    """What one rank knows of itself."""

    failure: str | None
    """The traceback of what it raised in forward or backward."""
    frozen: tuple[str, ...] | None
    """The parameters that it does not train; None where it brings nothing."""
    passes: int
    """How many backwards it has behind it."""
    steps: str
    """How many steps its optimizer has made, in words."""


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
        return MismatchError(
            f"{_subjects(known)}: every rank must make as many steps, with a LocalSGD of the same `every`", rank=rank
        )
    frozen = [account.frozen for account in accounts]
    if len({names for names in frozen if names is not None}) > 1:
        return MismatchError(_frozen(frozen), rank=rank)
    if len({made for made in status.steps if made is not None}) < 2:
        return MismatchError(
            "ranks disagree on what is to be reduced: a frozen parameter has a gradient on some of them only: "
            "`net.zero_grad()` forgets it",
            rank=rank,
        )
    known = ["nothing" if made is None else account.steps for made, account in zip(status.steps, accounts, strict=True)]
    return MismatchError(
        f"the parameters of the ranks differ, since they have made different numbers of steps: {in_words(known)}; "
        "who alone raises in or before `opt.step()`, or leaves it out, stays behind; no rank "
        "makes another one before every rank has loaded the same state, `net.load_state_dict(...)`, and that of its "
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
        f"{_subjects(known)}: every rank must make as many; where the data of some end early, have them wait for the "
        "others, `async with net.join():` around the loop"
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
        f"ranks train different parameters: {in_words([said(mine) for mine in frozen])}; no rank has made this step, "
        "and the next one works once all freeze the same"
    )


def some_in_join(status: PassStatus) -> str:
    """Return what is wrong where some ranks are in a `join` block, and some are not."""
    known = ["is in net.join()" if kind is StatusKind.JOIN else "is not" for kind in status.kinds]
    return f"{_subjects(known)}: every rank must enter and leave it with the others; this net cannot go on"


def _subjects(said: Sequence[str]) -> str:
    """Return sentences such as "rank 0 is late, ranks 1 and 2 are not"."""
    return ", ".join(f"rank {rank} {what}" for rank, what in enumerate(said))

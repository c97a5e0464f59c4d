"""Calls that carry Python objects instead of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from aiodist.collectives import operations
from aiodist.collectives.implementations import Primitives
from aiodist.collectives.messages import Arrived, MessageKind
from aiodist.collectives.operations import each, work_of
from aiodist.communicator import pickling as objects
from aiodist.communicator.arguments import CallTerms, check_rank, check_tag
from aiodist.communicator.fingerprint import Fingerprint
from aiodist.communicator.messages import PointToPoint
from aiodist.communicator.messenger import Reception
from aiodist.communicator.operation import Peer
from aiodist.handles import Handle
from aiodist.types import ANY

T = TypeVar("T")

_SEND, _RECV = Fingerprint("send_object"), Fingerprint("recv_object")


class Objects(PointToPoint):
    """Collectives and messages of Python objects, pickled at the call.

    A call raises errors of pickle. The await raises errors of unpickling. Unpickling runs code of the sender's choice:
    use these calls only among ranks that trust one another. The cost is that of a uint8 tensor with the pickled bytes.
    """

    def broadcast_object(
        self, obj: T, root: int = 0, *, timeout: float | None = None, name: str | None = None
    ) -> Handle[T]:
        """Copy root's object to all ranks.

        Every rank makes this call with the same `root`. The object is pickled at the call, so later changes are not
        sent. Unpickling runs code of the sender's choice: use this call only among ranks that trust one another.

        Args:
            obj: on root, any object that pickle takes; ignored elsewhere.
            root: the rank whose object all ranks get.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            A copy of root's object, or on root `obj` itself.

        Raises:
            ValueError: if `root` is no rank.
            Exception: errors of pickle, on root at the call. Errors of unpickling, on await.

        Example:
            ```python
            config = await coll.broadcast_object({"lr": 0.1} if coll.rank == 0 else None)
            print(config["lr"])
            ```

        Cost: one broadcast for a short object, two for a longer one.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, name=name)
        packed = objects.pack(obj) if self.rank == root else None
        what = Fingerprint("broadcast_object", root=root)
        if packed is not None:
            return self._issue(what, partial(_broadcast, packed=packed, obj=obj, root=root), [], [packed], terms)
        return self._issue(
            what, partial(operations.broadcast_bytes, packed=None, root=root), [], [], terms, objects.unpack
        )

    def allgather_object(
        self, obj: object, *, timeout: float | None = None, name: str | None = None
    ) -> Handle[list[Any]]:
        """Collect the objects of all ranks on every rank.

        Every rank makes this call. The object is pickled at the call. Unpickling runs code of the sender's choice: use
        this call only among ranks that trust one another.

        Args:
            obj: any object that pickle takes.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            A list of the objects, by rank.

        Raises:
            Exception: errors of pickle, at the call. Errors of unpickling, on await.

        Example:
            ```python
            hosts = await coll.allgather_object({"rank": coll.rank, "device": str(coll.device)})
            assert [each["rank"] for each in hosts] == list(range(coll.size))
            ```

        Cost: that of `allgather`.
        """
        packed, terms = objects.pack(obj), CallTerms(timeout, name=name)
        work = self._each(operations.allgather, [packed], packed)
        return self._issue(Fingerprint("allgather_object"), work, [], [packed], terms, objects.unpack_each)

    def gather_object(
        self, obj: object, root: int = 0, *, timeout: float | None = None, name: str | None = None
    ) -> Handle[list[Any] | None]:
        """Return every rank's object on `root`, as a list by rank, or None elsewhere. Cost: that of `gather`."""
        root, terms = check_rank(root, self.size), CallTerms(timeout, name=name)
        packed = objects.pack(obj)
        work = self._each(work_of("gather", root=root), [packed], packed)
        convert = objects.unpack_each if self.rank == root else None
        return self._issue(Fingerprint("gather_object", root=root), work, [], [packed], terms, convert)

    def scatter_object(
        self, objs: Sequence[Any] | None, root: int = 0, *, timeout: float | None = None, name: str | None = None
    ) -> Handle[Any]:
        """Return object number `rank` of root's list. `objs` is ignored elsewhere.

        Raises ValueError on root unless there are p objects. Cost: that of `scatter`.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, name=name)
        packed = [self._pack_each(objs)] if self.rank == root else None
        work = partial(operations.scatter, lists=packed, nested=False, out=None, root=root)
        what = Fingerprint("scatter_object", root=root)
        return self._issue(what, work, [], packed[0] if packed else [], terms, objects.unpack)

    def alltoall_object(
        self, objs: Sequence[Any], *, timeout: float | None = None, name: str | None = None
    ) -> Handle[list[Any]]:
        """Return the objects for this rank, by sending rank: `objs[r]` goes to rank r.

        Raises ValueError unless there are p objects. Cost: that of `alltoall`.
        """
        packed, terms = self._pack_each(objs), CallTerms(timeout, name=name)
        work = partial(each, work=operations.alltoall, ts=[packed])
        return self._issue(Fingerprint("alltoall_object"), work, [], packed, terms, objects.unpack_each)

    def send_object(
        self, obj: object, dst: int, tag: int = 0, *, synchronous: bool = False, timeout: float | None = None
    ) -> Handle[None]:
        """Send an object, pickled at the call, to one rank. `recv_object` and `messages` receive objects.

        `synchronous` and cost are those of `send`.
        """
        dst, tag = check_rank(dst, self.size, "dst"), check_tag(tag)
        return self._send(_SEND, [objects.pack(obj)], dst, tag, MessageKind.OBJECT, timeout, synchronous)

    def recv_object(self, src: int = ANY, tag: int = ANY, *, timeout: float | None = None) -> Handle[Any]:
        """Return the next object from `src` with `tag`. Matching, `cancel`, errors and cost are those of `recv`."""
        src, tag = check_rank(src, self.size, "src", any_rank=True), check_tag(tag, any_tag=True)
        asked = Reception(Peer(src, None, tag), MessageKind.OBJECT, None, [], convert=_unpacked)
        return self._messenger.receive(_RECV, asked, timeout)[0]

    def _pack_each(self, objs: Sequence[Any] | None) -> list[Tensor]:
        if objs is None or len(objs) != self.size:
            seen = "None" if objs is None else f"{len(objs)} objects"
            raise ValueError(f"objs is {seen}: expected {self.size}, one for each rank")
        return [objects.pack(obj) for obj in objs]


async def _broadcast(p: Primitives, packed: Tensor, obj: object, root: int) -> Any:  # noqa: ANN401
    await operations.broadcast_bytes(p, packed, root)
    return obj


def _unpacked(arrived: Arrived) -> Arrived:
    return replace(arrived, data=objects.unpack(arrived.data))

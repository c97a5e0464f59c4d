"""Calls that move tensors among all ranks, and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from aiodist.backends.base import dtype_name
from aiodist.collectives import operations
from aiodist.collectives.implementations import Primitives
from aiodist.collectives.operations import copy_to_all, each, nothing, work_of
from aiodist.communicator.arguments import (
    CallTerms,
    check_alike,
    check_apart,
    check_list,
    check_one_place,
    check_out,
    check_rank,
    check_single,
    check_sizes,
    check_tensor,
    lift,
    tensors_of,
)
from aiodist.communicator.base import Base
from aiodist.communicator.claims import claims_of, reading, writing
from aiodist.communicator.fingerprint import Fingerprint, fingerprint_of, how, kind_of
from aiodist.handles import Handle
from aiodist.streams.writes import check_written
from aiodist.types import Impl

Data = TypeVar("Data", Tensor, int, float, list[Tensor])


class Movement(Base):
    """`broadcast`, `allgather`, `gather`, `scatter`, `alltoall`, `alltoall_single` and `barrier`."""

    def broadcast(
        self,
        t: Data,
        root: int = 0,
        *,
        across: bool = False,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Data]:
        """Copy root's elements to all ranks, in place.

        Every rank makes this call with the same dtype, number of elements and `root`. `t` keeps its own shape.

        Args:
            t: a tensor; a number, which gives root's number; or a list of tensors, which is one operation.
            root: the rank whose elements all ranks get.
            across: True copies root's first tensor into every tensor of every list. The tensors are as in `allreduce`.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            `t`, or root's number.

        Raises:
            ValueError: if `root` is no rank.
            RuntimeError: on every rank whose `t` requires grad, in grad mode.

        Example:
            ```python
            weights = torch.randn(8) if coll.rank == 0 else torch.empty(8)
            await coll.broadcast(weights)  # those of rank 0
            ```

        Cost: at most log2(p) messages of n bytes (tree), or one in parts along a chain (long tensors). Source: Thakur,
        Rabenseifner, Gropp 2005, DOI 10.1177/1094342005051521; Pješivac-Grbović et al. 2007, DOI
        10.1007/s10586-007-0012-0.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, impl, name)
        if root == self.rank:
            check_written(t, "broadcast")
        if across:
            return self._broadcast_across(t, root, terms)
        planned: Handle[Any] | None = self._plans.issue("broadcast", t, None, terms, root=root)
        if planned is not None:
            return planned
        lifted, convert = lift(t, None)
        ts = tensors_of(lifted)
        to_result = (lambda _: t) if isinstance(t, (list, Tensor)) else convert
        work = self._each(work_of("broadcast", root=root), ts, lifted, None, to_result)
        claims = reading(*ts) if self.rank == root else writing(*ts)
        what = fingerprint_of("broadcast", ts, None, root, impl, given=t)
        return self._issue(what, work, claims, ts, terms)

    def _broadcast_across(self, t: object, root: int, terms: CallTerms) -> Handle[Any]:
        ts = check_list(t, None, "t")
        what = fingerprint_of("broadcast", ts, None, root, terms.impl, given=t, across=True)

        async def broadcast(p: Primitives) -> Any:  # noqa: ANN401
            await operations.broadcast(p, ts[:1], root=root)
            copy_to_all(ts)
            return t

        claims = [*reading(*ts[:1]), *writing(*ts[1:])] if self.rank == root else writing(*ts)
        return self._issue_across(what, ts, broadcast, claims, terms, empty=t)

    def allgather(
        self,
        t: Tensor | float | list[Tensor],
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Any]:
        """Collect the tensors of all ranks on every rank.

        Every rank makes this call with the same dtype. Sizes may differ. `t` is not changed.

        Args:
            t: a tensor; a number, which gives a list of numbers; or a list of tensors, which gives a list of results.
            out: a tensor for all tensors, concatenated along dim 0. Each tensor is then `(rows, ...)` with the same
                trailing shape, or a number as one row. A small `out` that owns its memory grows. `t` may be this rank's
                block of `out`.
            across: True returns one flat list for the list `t`, in the order rank * len + i. The tensors are as in
                `allreduce`.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            A list of the tensors by rank, in new memory, or `out`.

        Raises:
            TypeError: if `out` has another dtype than `t`.
            ValueError: on await, if the shapes cannot be concatenated in `out`.

        Example:
            ```python
            losses = await coll.allgather(0.5)  # a list of numbers, one for each rank
            rows = await coll.allgather(torch.ones(coll.rank + 1, 3), out=torch.empty(0))
            assert rows.shape == (sum(range(1, coll.size + 1)), 3)
            ```

        Cost: shapes and dtypes first, then p-1 messages and all other ranks' bytes (ring), or log2(p) messages of as
        many bytes (doubling, Bruck). Source: Bruck et al. 1997, DOI 10.1109/71.642949; Chan et al. 2007, DOI
        10.1002/cpe.1206.
        """
        terms = CallTerms(timeout, impl, name)
        if across:
            return self._allgather_across(t, out, terms)
        if (planned := self._plans.issue("allgather", t, out, terms)) is not None:
            return planned
        lifted, convert = lift(t, None)
        ts = tensors_of(lifted)
        if out is not None:
            check_single(t, "out")
            check_out(out, ts[0], numel=None, own_block=True)
        work = self._each(work_of("allgather"), ts, lifted, out, convert)
        what = fingerprint_of("allgather", ts, None, impl=impl, given=t)
        return self._issue(what, work, claims_of(ts, out), ts, terms, outs=(out,))

    def _allgather_across(self, t: object, out: object, terms: CallTerms) -> Handle[Any]:
        ts = check_list(t, None, "t")
        if out is not None:
            check_single(t, "out")
        what = fingerprint_of("allgather", ts, None, impl=terms.impl, given=t, across=True)

        async def allgather(p: Primitives) -> list[Any]:
            return [t for of_rank in zip(*await operations.allgather(p, ts), strict=True) for t in of_rank]

        return self._issue_across(what, ts, allgather, reading(*ts), terms, empty=[])

    def gather(
        self,
        t: Tensor | float | list[Tensor],
        root: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Any]:
        """Collect the tensors of all ranks on `root`.

        Every rank makes this call with the same dtype and `root`. Sizes may differ. `t` is not changed.

        Args:
            t: a tensor, a number, or a list of tensors, as in `allgather`.
            root: the rank that gets the tensors.
            out: on root, a tensor of shape `(all rows, ...)` for all tensors, as in `allgather`; ignored elsewhere.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            On root a list of the tensors by rank, each of the shape that its rank gave, or `out`. None elsewhere.

        Raises:
            ValueError: if `root` is no rank. On await, if the shapes cannot be concatenated in `out`.

        Example:
            ```python
            predictions = await coll.gather(torch.ones(coll.rank + 1))  # sizes may differ
            if coll.rank == 0:
                predictions = torch.cat(predictions)
            ```

        Cost: two messages to root from each other rank, shape and dtype first.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, impl, name)
        lifted, convert = lift(t, None)
        ts = tensors_of(lifted)
        if self.rank != root:
            check_written(out, "gather", "out")
            out = None
        if out is not None:
            check_single(t, "out")
            check_out(out, ts[0], numel=None)
        work = self._each(work_of("gather", root=root), ts, lifted, out, convert)
        what = fingerprint_of("gather", ts, None, root, impl, given=t)
        return self._issue(what, work, claims_of(ts, out), ts, terms, outs=(out,))

    def scatter(
        self,
        ts: Sequence[Tensor] | Sequence[Sequence[Tensor]] | None,
        root: int = 0,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Any]:
        """Distribute a list of tensors from `root`, one to each rank.

        Every rank makes this call with the same `root`. Only root gives tensors, of any shapes, which are not changed.

        Args:
            ts: on root, a list of p tensors, one for each rank, or a list of such lists; ignored elsewhere.
            root: the rank that gives the tensors.
            out: a tensor for the result, with as many elements; not with a list of lists.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            Root's tensor number `rank`, in new memory or in `out`, or a list of tensors if root gives a list of lists.

        Raises:
            TypeError: on root, if `ts` is no list of tensors.
            ValueError: if `root` is no rank, on root if `ts` has not p tensors, or for `out` with a list of lists.

        Example:
            ```python
            parts = list(torch.arange(8.0).tensor_split(coll.size)) if coll.rank == 0 else None
            mine = await coll.scatter(parts)
            ```

        Cost: two messages from root to each other rank, shape and dtype first.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, impl, name)
        if out is not None:
            check_tensor(out, "out")
        # Only the root and ranks with an `out` know the dtype.
        said = partial(Fingerprint, "scatter", how=how(None, impl), root=root, loose=True)
        if self.rank != root:
            what = said(None if out is None else kind_of(out))
            work = partial(operations.scatter, lists=None, nested=False, out=out, root=root)
            claims = [] if out is None else writing(out)
            return self._issue(what, work, claims, [], terms, outs=(out,), expects=out is None)
        if ts is None:
            raise TypeError("ts is None: root gives a list of tensors, one for each rank")
        lists, nested = self._lists(ts, out)
        if out is not None:
            check_out(out, lists[0][root], numel=lists[0][root].numel())
            check_apart(out, lists[0], lists[0][root])
        sent = [t for one in lists for t in one]
        kinds = set(map(kind_of, sent))
        work = partial(operations.scatter, lists=lists, nested=nested, out=out, root=root)
        what = said(kinds.pop() if len(kinds) == 1 else None)
        return self._issue(what, work, claims_of(sent, out), sent, terms, outs=(out,))

    def alltoall(
        self,
        ts: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        *,
        out: Sequence[Tensor] | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[list[Any]]:
        """Exchange tensors, so that `ts[r]` of each rank goes to rank r.

        Every rank makes this call with a list of p tensors of any shapes, which are not changed.

        Args:
            ts: a list of p tensors, or a list of such lists, which gives a list of results.
            out: a list of p tensors for the result, which grow as in `allgather`; not with a list of lists.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            A list of the tensors for this rank, by sending rank.

        Raises:
            TypeError: if `ts` is no list of tensors.
            ValueError: if `ts` has not p tensors, or with `impl="bruck"` different shapes.
            MismatchError: on await, with `impl="bruck"`, if tensors of other ranks have different shapes.

        Example:
            ```python
            received = await coll.alltoall([torch.full((2,), float(r)) for r in range(coll.size)])
            assert all(t[0] == coll.rank for t in received)
            ```

        Cost: 2(p-1) messages out and in, shape and dtype first. With `impl="bruck"` about log2(p) messages of half of
        all bytes, for short tensors. Source: Bruck et al. 1997, DOI 10.1109/71.642949.
        """
        lists, nested = self._lists(ts, out)
        form = how(None, impl, extra=f"{len(lists)} lists" if nested else "")
        what = Fingerprint("alltoall", ", ".join(sorted({kind_of(t) for one in lists for t in one})), how=form)
        if impl == "bruck":
            alike = check_alike([t for one in lists for t in one])
            what = Fingerprint("alltoall", dtype_name(alike[0].dtype), f"[{alike[0].numel()}]", form)
        outs = None if out is None else check_list(out, self.size, "out")
        for t, into in zip(lists[0], outs or (), strict=False):
            check_out(into, t, numel=0)
            check_apart(into, lists[0], t)
        terms = CallTerms(timeout, impl, name)
        # Detached, since an `out`, which may grow, may be one of these tensors.
        detached = [[t.detach() for t in one] for one in lists]
        work = partial(each, work=operations.alltoall, ts=detached, out=outs, listed=nested)
        sent = [t for one in lists for t in one]
        claims = claims_of(sent, *(outs or ()))
        return self._issue(what, work, claims, sent, terms, outs=outs or ())

    def alltoall_single(
        self,
        t: Tensor,
        *,
        out: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Tensor]:
        """Exchange rows of one tensor, so that each rank gets a block of rows from every rank.

        Every rank gives a `t` of shape `(rows, ...)`, which is not changed, except as `out`. Without `sizes`, `t` has
        one shape on all ranks, and the number of ranks divides dim 0. With `sizes`, on all ranks, rank r gets
        `sizes[r]` rows of `t`, after a message with the number of rows. A small `out` that owns its memory grows.
        Returns the rows from all ranks, in rank order along dim 0. Raises ValueError if `sizes` do not add up to the
        rows of `t`. Cost: p-1 messages out and in, with `sizes` 2(p-1). With `impl="bruck"` about log2(p) messages of
        half of `t`, for short tensors without `sizes`.
        """
        terms = CallTerms(timeout, impl, name)
        if sizes is None and (planned := self._plans.issue("alltoall_single", t, out, terms)) is not None:
            return planned
        check_tensor(t)
        if t.dim() == 0:
            raise ValueError("t has no dimension to cut: expected at least one")
        if sizes is not None:
            sizes = check_sizes(sizes, t.shape[0], self.size, "rows")
            if impl == "bruck":
                raise ValueError("impl='bruck' takes no sizes: expected equal blocks on all ranks")
        elif t.shape[0] % self.size:
            raise ValueError(f"t has {t.shape[0]} rows: expected a multiple of the {self.size} ranks, or sizes=")
        if out is not None and check_out(out, t, numel=None).device != t.device:
            raise ValueError(f"out is on {out.device}: expected {t.device}, as t")
        # The shape of `t` if the ranks send equal blocks, else of a row.
        shape = str(list(t.shape if sizes is None else t.shape[1:]))
        form = how(None, impl, extra="" if sizes is None else "rows by sizes")
        # Detached, since `out`, which may grow, may be t itself.
        work = self._each(work_of("alltoall_single", sizes=sizes), [t], t, out)
        what = Fingerprint("alltoall_single", kind_of(t), shape, form)
        return self._issue(what, work, claims_of([t], out), [t], terms, outs=(out,))

    def _lists(self, ts: Sequence[Any], out: object) -> tuple[list[list[Tensor]], bool]:
        """Return the argument of scatter or alltoall as a list of lists, with True if `ts` is a list of lists."""
        nested = isinstance(ts, Sequence) and bool(ts) and not isinstance(ts[0], Tensor)
        if nested and out is not None:
            raise ValueError("out= goes with one list of tensors: expected ts to be one list, not a list of lists")
        lists = [check_list(x, self.size) for x in ts] if nested else [check_list(ts, self.size)]
        check_one_place([t for one in lists for t in one])
        return lists, nested

    def barrier(self, *, timeout: float | None = None, name: str | None = None) -> Handle[None]:
        """Wait until every rank has made this call.

        A barrier waits for the other ranks, not for operations. Earlier handles that were never awaited are still
        reported.

        Args:
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            None.

        Raises:
            OperationTimeout: on await, after `timeout` seconds, with the ranks that are late and their lines.

        Example:
            ```python
            if coll.rank == 0:
                print("rank 0 has prepared the data")
            await coll.barrier()
            ```

        Cost: the comparison of every collective: a word in memory within a host, log2(hosts) small messages of one rank
        of each host. Source: Hensgen, Finkel, Manber 1988, Two algorithms for barrier synchronization.
        """
        if name is not None:
            return self._issue(Fingerprint("barrier"), nothing, [], [], CallTerms(timeout, name=name))
        planned = self._plans.barrier(timeout)
        return self._dispatcher.barrier(timeout) if planned is None else planned

"""Calls that combine the ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from aiodist import _core
from aiodist.backends.arithmetic import check_op
from aiodist.collectives import operations
from aiodist.collectives.across import reduce_parts
from aiodist.collectives.implementations import Primitives
from aiodist.collectives.metadata import overlaps
from aiodist.collectives.operations import nothing, work_of
from aiodist.communicator.arguments import (
    CallTerms,
    blocks_of,
    check_across,
    check_list,
    check_out,
    check_rank,
    check_single,
    lift,
    product,
    tensors_of,
)
from aiodist.communicator.base import Base
from aiodist.communicator.claims import claims_of, reading, writing
from aiodist.communicator.fingerprint import fingerprint_of
from aiodist.handles import Handle
from aiodist.streams.writes import check_written
from aiodist.types import Impl, Op, ReduceOp

Data = TypeVar("Data", Tensor, int, float, list[Tensor])


class Reductions(Base):
    """Reductions: `allreduce`, `reduce`, `reduce_scatter`, `scan`, `exscan`."""

    @_core.allreduce_method
    def allreduce(
        self,
        t: Data,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Data]:
        """Reduce `t` elementwise over all ranks, in place.

        Every rank makes this call with the same shape, dtype and `op`. Integer tensors wrap around. 16-bit floats are
        summed in float32 and rounded once.

        Args:
            t: a tensor; a number, which gives a number; or a list of tensors, each reduced by itself in one operation.
            op: "sum", "mean" (or "avg"), "prod" (or "product"), "min", "max", "band", "bor" or "bxor".
            out: a tensor for the result, with as many elements as `t`. `t` is then not changed.
            across: True reduces over the list `t` too, in the order of all parts of all ranks, so that the bits do not
                depend on the ranks that have the parts. Each tensor of the list becomes the total, unless there is an
                `out`. The tensors have one shape and dtype, all on one device or each on a separate CUDA device. Ranks
                may have different numbers of tensors.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            `t`, `out` or a number. The sum of Python ints is exact, of any size.

        Raises:
            TypeError: if `op` does not take the dtype, such as "mean" of integers.
            RuntimeError: if a tensor to be written requires grad, in grad mode.
            OverflowError: if an int does not fit into 64 bits. On await, if a product of ints does not fit.

        Example:
            ```python
            t = torch.ones(4) * coll.rank
            await coll.allreduce(t)  # t has the sum over all ranks
            loss = await coll.allreduce(0.25, "mean")  # a number
            ```

        Cost: 2(p-1) messages and 2n(p-1)/p bytes (ring, for long tensors), or log2(p) messages of n bytes (doubling,
        for short ones). Source: Patarasuk, Yuan 2009, DOI 10.1016/j.jpdc.2008.09.002; Thakur, Rabenseifner, Gropp 2005,
        DOI 10.1177/1094342005051521.
        """
        terms = CallTerms(timeout, impl, name)
        if across:
            return self._reduction_across("allreduce", t, op, out, terms)
        planned: Handle[Any] | None = self._plans.issue("allreduce", t, out, terms, op=op)
        return self._reduction("allreduce", t, op, out, terms) if planned is None else planned

    def scan(
        self,
        t: Data,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Data]:
        """Reduce `t` elementwise over ranks 0 to this one, in place.

        `t` and the result have one shape, the same on all ranks. `op`, `out`, lists and errors are those of
        `allreduce`. Cost: log2(p) messages of n bytes (doubling), or one in a chain of p-1 steps. Source: Hillis,
        Steele 1986, DOI 10.1145/7902.7903.
        """
        terms = CallTerms(timeout, impl, name)
        planned: Handle[Any] | None = self._plans.issue("scan", t, out, terms, op=op)
        return self._reduction("scan", t, op, out, terms) if planned is None else planned

    def exscan(
        self,
        t: Data,
        op: Op = "sum",
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Data]:
        """Reduce `t` elementwise over the ranks before this one, in place. On rank 0 `t` is not changed.

        `t` and the result have one shape, the same on all ranks. `op`, `out`, lists and errors are those of
        `allreduce`. Cost: one message of n bytes, in a chain of p-1 steps.
        """
        return self._reduction("exscan", t, op, out, CallTerms(timeout, impl, name))

    def reduce(
        self,
        t: Tensor | float | list[Tensor],
        op: Op = "sum",
        root: int = 0,
        *,
        out: Tensor | None = None,
        across: bool = False,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Any]:
        """Reduce `t` elementwise over all ranks, in place on `root`.

        Every rank makes this call with the same shape, dtype, `op` and `root`. On the other ranks `t` is not changed.

        Args:
            t: a tensor, a number, or a list of tensors, as in `allreduce`.
            op: the operator, as in `allreduce`.
            root: the rank that gets the result.
            out: a tensor for the result on root, with as many elements as `t`; ignored elsewhere.
            across: True reduces the list `t` too, into root's first tensor or `out`, as in `allreduce`.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            On root `t`, `out` or a number. None elsewhere.

        Raises:
            ValueError: if `root` is no rank.
            TypeError: if `op` does not take the dtype.
            RuntimeError: if a tensor to be written requires grad, in grad mode.

        Example:
            ```python
            total = await coll.reduce(1.5, root=0)
            if coll.rank == 0:
                print(total)  # 1.5 times the number of ranks
            ```

        Cost: one message of n bytes, in log2(p) steps (tree, for short tensors), or in parts along a chain. Source:
        Thakur, Rabenseifner, Gropp 2005, DOI 10.1177/1094342005051521.
        """
        root, terms = check_rank(root, self.size), CallTerms(timeout, impl, name)
        if root != self.rank:
            check_written(t[:1] if across and isinstance(t, list) else out, "reduce", "t" if across else "out")
        if across:
            return self._reduction_across("reduce", t, op, out, terms, root)
        if (planned := self._plans.issue("reduce", t, out, terms, op=op, root=root)) is not None:
            return planned
        return self._reduction("reduce", t, op, out, terms, root)

    def reduce_scatter(
        self,
        t: Tensor | list[Tensor],
        op: Op = "sum",
        sizes: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        timeout: float | None = None,
        impl: Impl = "auto",
        name: str | None = None,
    ) -> Handle[Any]:
        """Reduce `t` elementwise over all ranks, with this rank's block of the result.

        Every rank makes this call with a `t` of the same shape `(rows, ...)`, which is not changed unless `out` is a
        part of `t`. The blocks are cut along dim 0. If the rows do not divide evenly, the first ranks get one row more.

        Args:
            t: a tensor, or a list of tensors, each reduced by itself in one operation.
            op: the operator, as in `allreduce`.
            sizes: number of elements for each rank, the same list on every rank. `t` is then cut flat into results of
                shape `(sizes[rank],)`.
            out: a tensor for the result. `out` may be `t`, with the block in the first elements, or any part of `t`.
            timeout: seconds from the call until the await raises OperationTimeout, or None for the default of `init`.
            impl: the name of an implementation, or "auto" to choose by the table of `selector`.
            name: matches the call with those of the same name, in any order (see `Communicator`).

        Returns:
            This rank's block, in new memory or in `out`, or a list of blocks if `t` is a list.

        Raises:
            ValueError: if `sizes` do not add up to the elements of `t`, or `t` has no dimensions and there are no
                `sizes`.
            TypeError: if `op` does not take the dtype.

        Example:
            ```python
            t = torch.arange(float(2 * coll.size))
            block = await coll.reduce_scatter(t, "mean")  # 2 elements on each rank
            ```

        Cost: p-1 messages and n(p-1)/p bytes (ring), or log2(p) messages of as many bytes (halving). Source: Chan et
        al. 2007, DOI 10.1002/cpe.1206.
        """
        terms = CallTerms(timeout, impl, name)
        if sizes is None and (planned := self._plans.issue("reduce_scatter", t, out, terms, op=op)) is not None:
            return planned
        ts = tensors_of(t)
        known = _op_for(ts, op)
        blocks = [blocks_of(x, sizes, self.size) for x in ts]
        if out is not None:
            check_single(t, "out")
            counts = [block.numel() for block in blocks[0]]
            check_out(out, ts[0], numel=counts[self.rank], part=True)

        work = self._each(work_of("reduce_scatter", known, blocks=blocks), ts, t, out)
        cut_as = "" if sizes is None else f"sizes {list(sizes)}"
        what = fingerprint_of("reduce_scatter", ts, op, impl=impl, given=t, extra=cut_as)
        written = out if out is None or not overlaps(out, ts[0]) else ts[0]
        return self._issue(what, work, claims_of(ts, written), ts, terms, outs=(out,))

    # --- stopping together ------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Ask all ranks of the world to stop together, as a signal does with `init(stop_on_signal=True)`.

        Local, from any thread. The request cannot be taken back. The other ranks learn of the request in their next
        `stopping()`, or by `stop_requested` of a `DataParallel` after the next step.
        """
        self._resources.stop_requested = True

    def stopping(self, *, timeout: float | None = None) -> Handle[bool]:
        """Return True on every rank if any rank was asked to stop, as for `while not await coll.stopping():`.

        Every rank makes this call. Cost: an allreduce of one byte.
        """
        terms, said = CallTerms(timeout, "auto", None), torch.tensor([self._resources.stop_requested], device="cpu")
        what = fingerprint_of("stopping", [said], None)
        return self._issue(what, partial(_stopping, said=said), writing(said), [said], terms)

    # --- building reductions --------------------------------------------------------------------------------

    def _reduction(
        self,
        kind: str,
        t: Any,  # noqa: ANN401
        op: str,
        out: Tensor | None,
        terms: CallTerms,
        root: int | None = None,
    ) -> Handle[Any]:
        """Reduce a tensor, a number or a list. With a `root`, only that rank gets the result."""
        mine = root in (None, self.rank)
        lifted, convert = lift(t, op)
        ts = tensors_of(lifted)
        known = _op_for(ts, op)
        if out is not None and mine:
            check_single(t, "out")
            check_out(out, ts[0], numel=ts[0].numel())

        if isinstance(t, list) or (isinstance(t, Tensor) and out is None):
            result = t if mine else None
            convert = lambda _: result  # noqa: E731
        late = product if convert is product else None  # may raise, so the dispatcher converts
        work = self._each(work_of(kind, known, root), ts, lifted, out, None if late else convert)
        claims = (writing(*ts) if out is None else claims_of(ts, out)) if mine else reading(*ts)
        what = fingerprint_of(kind, ts, op, root, terms.impl, given=t)
        return self._issue(what, work, claims, ts, terms, late, outs=(out,))

    def _reduction_across(
        self, kind: str, t: object, op: str, out: Tensor | None, terms: CallTerms, root: int | None = None
    ) -> Handle[Any]:
        """Reduce over the list and the ranks, into `out`, every tensor, or the first tensor of `root`."""
        if (planned := self._plans.issue_across(kind, t, out, terms, op, root)) is not None:  # type: ignore[arg-type]
            return planned
        ts = check_list(t, None, "t")
        mine = root in (None, self.rank)
        if out is not None and mine:
            for part in ts:
                check_out(out, part, numel=part.numel())
        what = fingerprint_of(kind, ts[:1], op, root, terms.impl, across=True)
        known = _op_for(ts, op)
        into = [] if not mine else [out] if out is not None else ts if root is None else ts[:1]
        result = None if not mine else t if out is None and root is None else next(iter(into), None)
        if not ts:
            return self._issue(what, partial(nothing, result=result), [], ts, terms)
        check_across(ts, parts=True)
        parts, targets = [part.detach() for part in ts], [target.detach() for target in into]

        async def over_all(p: Primitives) -> Any:  # noqa: ANN401
            if out is None or not mine:
                await reduce_parts(p, parts, targets, known, root)
                return result
            fitting = operations.fit(out, tuple(ts[0].shape), ts[0].dtype)
            await reduce_parts(p, parts, [fitting], known, root)
            return fitting

        return self._issue(what, over_all, claims_of(ts, *into), ts, terms, outs=(out,))


def _op_for(ts: Sequence[Tensor], op: str) -> ReduceOp:
    """Return `op` as a ReduceOp, or raise if `op` does not take the dtype of one of `ts`."""
    for t in ts:
        check_op(op, t.dtype)
    return ReduceOp(op)


async def _stopping(p: Primitives, said: Tensor) -> bool:
    """Return True if `said` is true on any rank."""
    (any_said,) = await operations.elementwise(p, [said], None, ReduceOp.MAX)
    return bool(any_said)

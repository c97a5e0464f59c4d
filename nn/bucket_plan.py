"""Which parameter is in which bucket, and the order in which gradients come. No threads, hooks or communication."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aiodist.nn.buckets import Bucket, RowBucket, Slot, deal

_KEPT = 2
MakeBucket = Callable[[Sequence[Slot]], Bucket]


@dataclass(frozen=True)
class Sizes:
    """Sizes of buckets, in bytes."""

    bucket: int
    first: int

    def __post_init__(self) -> None:
        for name in ("bucket", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} bucket: {getattr(self, name)} bytes: expected at least 1")


class BucketPlan:
    """Buckets of some parameters, the same on every rank, and the expected order of their gradients.

    A hook costs 2 us each time. So only the first pass hooks every parameter, and sends all buckets at its end. From
    then on the order is known, and each bucket has one hook, on its *sentinel*: the parameter whose gradient came last.
    Parameters that get several gradients in one backward keep a hook too.
    """

    def __init__(self, trained: Sequence[bool], buckets: Sequence[Bucket]) -> None:
        self.trained = list(trained)
        """True for each parameter that is trained. A frozen one is in a bucket if it has an old gradient."""
        self.buckets = list(buckets)
        """Buckets, in the order in which they are sent."""
        self.members = frozenset(slot.index for bucket in buckets for slot in bucket.slots)
        self.columns = [float(index in self.members) for index in range(len(trained))]
        """1.0 for each parameter in a bucket, else 0.0."""
        self.outside = [index for index in range(len(trained)) if index not in self.members]
        self.learning = True
        """True if this pass hooks every parameter, and sends all buckets at its end."""
        self.order: list[int] = []
        """Order of the gradients on this rank, when every parameter was hooked last."""
        self.often: dict[int, int] = {}
        """Number of gradients in one backward, by parameter, if there are several."""
        self.sentinels: dict[int, int] = {}
        """Number of the bucket, by the parameter whose gradient comes last in it."""
        self.learnt: list[int] | None = None
        """Order of rank 0's gradients, or None while it is unknown."""
        self.new_order: list[int] | None = None
        """The same order, until the buckets are made in it."""
        self.missed = 0
        """Number of passes in a row in which a bucket was full before the end of backward, and was not sent then."""
        self._patience = 1

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Replace the buckets by others of the same parameters."""
        self.buckets = list(buckets)
        self._set_sentinels()

    @cached_property
    def trained_slots(self) -> Sequence[Slot]:
        """Slots of the trained parameters, bucket after bucket."""
        return [slot for bucket in self.buckets for slot in bucket.slots if self.trained[slot.index]]

    def versions(self) -> list[int]:
        """Return the version of each trained parameter; 0.1 us for each."""
        return [slot.parameter._version for slot in self.trained_slots]

    def hooked(self) -> set[int]:
        """Return the parameters whose hook reports gradients."""
        if self.learning:
            return {index for index in self.members if self.trained[index]}
        return {*self.sentinels, *self.often}

    def study(self, counts: Mapping[int, int], *, missed: bool) -> None:
        """Learn the order from a pass that hooked every parameter, else check that the sentinels still come last.

        `counts` has the number of gradients by parameter, in the order of the first ones. If `missed`, some bucket was
        full before the end of backward, and was not sent then.
        """
        if self.learning:
            self.order = list(counts)
            self.often = {index: times for index, times in counts.items() if times > 1}
            self.learning = not self.order
            self._set_sentinels()
            return
        self.missed = self.missed + 1 if missed else 0
        if self.missed > self._patience:
            self.missed = 0
            self._patience *= 2
            self.learning = True

    def learn(self, order: Sequence[int]) -> None:
        """Take the `order` of rank 0's gradients. Members without a gradient come last, in the order of backward."""
        came = [index for index in order if index in self.members]
        known = set(came)
        rest = [index for index in sorted(self.members, reverse=True) if index not in known]
        self.learnt = self.new_order = [*came, *rest]

    def _set_sentinels(self) -> None:
        if self.learning:
            return
        when = {index: place for place, index in enumerate(self.order)}
        self.sentinels = {}
        for number, bucket in enumerate(self.buckets):
            last = max(bucket.slots, key=lambda slot: when.get(slot.index, -1))
            self.sentinels[last.index] = number

    def complete(self, bucket: Bucket, counts: Mapping[int, int]) -> bool:
        """Return True if every gradient of `bucket` has come, as often as expected."""
        if not bucket.came():
            return False
        return not self.often or all(
            counts.get(slot.index, 0) >= self.often.get(slot.index, 0) for slot in bucket.slots
        )


class Planner:
    """Makes the plans of a module's parameters, the same on all ranks."""

    def __init__(
        self,
        slots: Sequence[Slot],
        trained: Sequence[bool],
        sizes: Sizes,
        allocate: Callable[[int, torch.dtype], Tensor],
    ) -> None:
        """`slots` are of all parameters; `allocate` returns memory for a bucket."""
        self._slots = slots
        self._sizes = sizes
        self._allocate = allocate
        self._make: MakeBucket | None = None
        self._groups: list[list[int]] | None = None
        """Parameters that share a bucket, after `keep`; frozen ones are skipped."""
        self._kept: dict[tuple[bool, ...], BucketPlan] = {}
        """Newest plans, by their members, so that two parts of a model can take turns (GANs)."""
        self.change(trained, trained)

    def change(self, trained: Sequence[bool], members: Sequence[bool]) -> None:
        """Let `plan` have these `members`. A plan that is still kept returns with what it has learnt."""
        plan = self._kept.pop(tuple(members), None)
        if plan is None or plan.trained != trained:
            order = [index for index in range(len(members) - 1, -1, -1) if members[index]]
            plan = BucketPlan(trained, self._buckets(order))
        self.plan = self._kept[tuple(members)] = plan
        for old in list(self._kept)[:-_KEPT]:
            del self._kept[old]

    def reorder(self, order: Sequence[int]) -> None:
        """Make the buckets in the `order` that was learnt."""
        self.plan.new_order = None
        self.plan.set_buckets(self._buckets(order))

    def keep(self, groups: list[list[int]] | None) -> list[list[Slot]]:
        """Keep the parameters together that share a bucket now, or those of `groups`. Return their slots.

        Parameters that are in no bucket get buckets too.
        """
        if groups is not None:
            self._groups = groups
            self.remake(self._make)
        elif self._groups is None:
            self._groups = [[slot.index for slot in bucket.slots] for bucket in self.plan.buckets]
            self._groups += self._divided(reversed(self.plan.outside))
            self._kept = {key: made for key, made in self._kept.items() if made is self.plan}
        return [[self._slots[index] for index in group] for group in self._groups]

    def remake(self, make: MakeBucket | None) -> None:
        """Let `make` make the buckets from now on, or, if it is None, make ordinary ones."""
        self._make = make
        order = [slot.index for bucket in self.plan.buckets for slot in bucket.slots]
        self._kept = {key: made for key, made in self._kept.items() if made is self.plan}
        self.plan.set_buckets(self._buckets(order))

    def _buckets(self, order: Sequence[int]) -> list[Bucket]:
        """Return buckets of the parameters in `order`, in the order in which they become full."""
        if self._groups is None:
            groups = self._divided(order)
        else:
            when = {index: place for place, index in enumerate(order)}
            kept = [[index for index in group if index in when] for group in self._groups]
            groups = sorted(filter(None, kept), key=lambda group: max(when[index] for index in group))
        return [self._bucket([self._slots[index] for index in group]) for group in groups]

    def _bucket(self, slots: Sequence[Slot]) -> Bucket:
        if self._make is not None:
            return self._make(slots)
        return (RowBucket if slots[0].by_rows else Bucket)(slots, self._allocate)

    def _divided(self, order: Iterable[int]) -> list[list[int]]:
        """Return the parameters in `order`, divided among buckets."""
        nbytes = [slot.nbytes for slot in self._slots]
        kinds = [(slot.dtype, slot.parameter.device, (slot.index + 1) * slot.by_rows) for slot in self._slots]
        when = {index: place for place, index in enumerate(order)}
        blocks: dict[Hashable, list[int]] = {}
        for index in when:
            if self._slots[index].block is not None:
                blocks.setdefault((self._slots[index].block, kinds[index]), []).append(index)
        loose = [index for index in when if self._slots[index].block is None]
        groups = deal(nbytes, kinds, loose, first=self._sizes.first, most=self._sizes.bucket)
        return groups if not blocks else sorted([*groups, *blocks.values()], key=lambda group: when[group[-1]])

"""C1: messages meet receives as MPI says: in order for each source and tag, also with any source."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.backends.matching import Matching
from aiodist.types import ANY

SOURCES = (0, 1, 2)
TAGS = (0, 7)


@dataclass(eq=False)
class Labelled:
    src: int
    tag: int
    number: int
    kind: int = 0
    order: int = 0


def fits(receive: Labelled, message: Labelled) -> bool:
    wants = (receive.src, message.src), (receive.tag, message.tag), (receive.kind, message.kind)
    return all(wanted in (ANY, has) for wanted, has in wants)


class Model:
    """A model of `Matching`: two lists in the order of issue, and the first pair that fits."""

    def __init__(self) -> None:
        self.receives: list[Labelled] = []
        self.messages: list[Labelled] = []

    def receive(self, receive: Labelled) -> Labelled | None:
        fitting = [one for one in self.messages if fits(receive, one)]
        return self._first(fitting, self.messages, receive, self.receives)

    def message(self, message: Labelled) -> Labelled | None:
        fitting = [one for one in self.receives if fits(one, message)]
        return self._first(fitting, self.receives, message, self.messages)

    @staticmethod
    def _first(
        fitting: list[Labelled], there: list[Labelled], new: Labelled, waiting: list[Labelled]
    ) -> Labelled | None:
        if fitting:
            there.remove(fitting[0])
            return fitting[0]
        waiting.append(new)
        return None


def receive(matching: Matching[Labelled, Labelled], wanted: Labelled) -> Labelled | None:
    return matching.post(wanted)


def message(matching: Matching[Labelled, Labelled], arrived: Labelled) -> Labelled | None:
    found = matching.match(arrived.src, arrived.tag, arrived.kind)
    if found is None:
        matching.keep(arrived)
    return found


KINDS = st.sampled_from((0, 1, ANY))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("receive"), st.sampled_from((*SOURCES, ANY)), st.sampled_from((*TAGS, ANY)), KINDS),
        st.tuples(st.just("message"), st.sampled_from(SOURCES), st.sampled_from(TAGS), st.sampled_from((0, 1))),
        st.tuples(st.sampled_from(("lost", "cancelled")), st.sampled_from(SOURCES), st.just(0), st.just(0)),
        st.just(("closed", 0, 0, 0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_c1_matching_does_what_two_lists_do(steps: list[tuple[str, int, int, int]]) -> None:
    matching: Matching[Labelled, Labelled] = Matching()
    model = Model()
    for number, (what, src, tag, kind) in enumerate(steps):
        one = Labelled(src, tag, number, kind)
        if what == "receive":
            assert receive(matching, one) == model.receive(one)
        elif what == "message":
            assert message(matching, one) == model.message(one)
        elif what == "lost":  # a rank is lost: its messages, and receives from it or from any rank
            sent = matching.cancel_messages([m for m in matching.messages if m.src == src])
            waiting = matching.cancel_receives([r for r in matching.receives if r.src in (ANY, src)])
            assert set(sent) == {m for m in model.messages if m.src == src}
            assert set(waiting) == {r for r in model.receives if r.src in (ANY, src)}
            model.messages = [m for m in model.messages if m not in sent]
            model.receives = [r for r in model.receives if r not in waiting]
        elif what == "cancelled":  # the receive that came first
            first = model.receives[:1]
            assert matching.receives[:1] == first
            assert matching.cancel_receives(first) == first
            del model.receives[:1]
        else:
            assert set(matching.cancel_receives()) == set(model.receives)
            assert set(matching.cancel_messages()) == set(model.messages)
            model = Model()
    assert set(matching.cancel_receives()) == set(model.receives)
    assert set(matching.cancel_messages()) == set(model.messages)


@given(st.permutations([0, 0, 1, 1, 2]))
def test_c1_messages_of_one_source_and_tag_stay_in_order_for_any_source(sources: list[int]) -> None:
    matching: Matching[Labelled, Labelled] = Matching()
    for number, src in enumerate(sources):
        assert message(matching, Labelled(src, 0, number)) is None
    came = [receive(matching, Labelled(ANY, 0, 0)) for _ in sources]
    assert [one.number for one in came if one is not None] == list(range(len(sources)))


@pytest.mark.parametrize("closing", ["cancel_receives", "cancel_messages"])
def test_c1_what_was_cancelled_meets_nothing(closing: str) -> None:
    matching: Matching[Labelled, Labelled] = Matching()
    one, other = Labelled(1, 7, 0), Labelled(1, 7, 1)
    begin, end = (receive, message) if closing == "cancel_receives" else (message, receive)
    assert begin(matching, one) is None
    assert getattr(matching, closing)([]) == []
    assert getattr(matching, closing)() == [one]
    assert getattr(matching, closing)() == []
    assert end(matching, other) is None, "nothing is there"
    assert begin(matching, one) == other

"""W3: the state machine of generations, with all orders of events of three ranks, and random ones."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist.elastic.generations import (
    Admit,
    Cancel,
    Form,
    GenerationMembers,
    Generations,
    Refusal,
    Refuse,
    Regrouping,
)


class Model:
    """Ranks, the machine between them, and the invariants after every event.

    A process is in a generation that has begun, or moves to one that is formed.
    """

    def __init__(self, size: int, joiners: int) -> None:
        self.machine = Regrouping(size)
        self.joiners = joiners
        self.members = {0: list(range(size))}
        """The processes of each generation, by rank."""
        self.place = dict.fromkeys(range(size), 0)
        """The generation that each living process is in."""
        self.waits: set[int] = set()
        """Processes that have asked."""
        self.told: dict[int, int] = {}
        """Target generation of each moving process."""
        self.refused: list[tuple[int, Refusal]] = []
        self.count = size
        for rank in range(size):
            self.run(self.machine.joined(0, rank))

    def run(self, instructions: list[Any]) -> None:  # noqa: C901  - one branch for each instruction
        for instruction in instructions:
            match instruction:
                case Form(generation):
                    before = self.members[self.machine.current.number]
                    new = list(range(self.count, self.count + len(generation.joiners)))
                    self.count += len(new)
                    self.members[generation.number] = [*(before[rank] for rank in generation.survivors), *new]
                    for process in new:
                        self.told[process] = generation.number
                case Admit(generation):
                    before = self.members[self.machine.current.number]
                    for rank in generation.survivors:
                        self.waits.remove(before[rank])
                        self.told[before[rank]] = generation.number
                case Refuse(ranks, kind, _):
                    for rank in ranks:
                        process = self.members[self.machine.current.number][rank]
                        self.waits.remove(process)
                        self.refused.append((process, kind))
                case Cancel(generation, _):
                    for process in self.members.pop(generation.number):
                        if self.told.pop(process, None) is not None and process in self.place:
                            self.refused.append((process, Refusal.CANCELLED))
        self.check()

    def events(self) -> list[tuple[str, int]]:
        """Return what can happen next."""
        current = self.machine.current.number
        events: list[tuple[str, int]] = [("die", process) for process in {*self.place, *self.told}]
        for process in self.place:
            if process not in self.told and process not in self.waits and self.place[process] == current:
                events += [("shrink", process)] + ([("grow", process)] if self.joiners else [])
        return events + [("come", process) for process in self.told if not self.has_come(process)]

    def has_come(self, process: int) -> bool:
        number = self.told[process]
        return self.members[number].index(process) in self.machine.came

    def do(self, event: str, process: int) -> None:
        current = self.machine.current.number
        match event:
            case "shrink" | "grow":
                self.waits.add(process)
                joiners = self.joiners if event == "grow" else 0
                self.run(self.machine.ask(self.members[current].index(process), joiners))
            case "come":
                number = self.told[process]
                instructions = self.machine.joined(number, self.members[number].index(process))
                if self.machine.current.number == number:
                    self.begun(number)
                self.run(instructions)
            case "die":
                self.die(process)

    def begun(self, number: int) -> None:
        for process in self.members[number]:
            del self.told[process]
            self.place[process] = number
        assert set(self.place) == set(self.members[number])

    def die(self, process: int) -> None:
        """All its connections break, in the order in which it had opened them."""
        old, new = self.place.pop(process, None), self.told.pop(process, None)
        self.waits.discard(process)
        for number in (old, new):
            if number is not None and number in self.members:
                self.run(self.machine.left(number, self.members[number].index(process), "it died"))

    def check(self) -> None:
        machine = self.machine
        current = self.members[machine.current.number]
        assert {current[rank] for rank in machine.present} == {
            process for process, number in self.place.items() if number == machine.current.number
        }
        assert {current[rank] for rank in machine.asked} == self.waits
        if machine.forming is not None:
            assert machine.forming.number > machine.current.number
            assert set(machine.forming.survivors) == machine.present, "all that live are in the next"
            assert set(self.told.values()) <= {machine.forming.number}
        else:
            assert not self.told, "nobody is on the way to nowhere"
        alone = self.waits == set(self.place) and bool(self.place)
        assert not alone or machine.forming is not None, "all have asked, and nothing comes of it"

    def finish(self) -> None:
        """Without further deaths, all live ranks meet."""
        for _ in range(200):
            if not self.place:
                return
            if not self.waits and not self.told and len(self.place) == self.machine.current.size:
                return
            events = [event for event in self.events() if event[0] in ("come", "shrink")]
            assert events, "they wait for one another for ever"
            self.do(*events[0])
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("joiners", [0, 1])
def test_w3_each_order_of_events_of_three_ranks_ends_with_all_that_live_in_one_generation(joiners: int) -> None:
    """Try every sequence of questions, arrivals and deaths up to a depth, each with an end without deaths."""
    depth = 6 if joiners else 7
    seen: set[Any] = set()
    queue: deque[tuple[tuple[str, int], ...]] = deque([()])
    while queue:
        history = queue.popleft()
        model = Model(3, joiners)
        for event in history:
            model.do(*event)
        machine = model.machine
        state = (
            machine.current.number, str(machine.forming), frozenset(machine.present), frozenset(machine.came),
            frozenset(machine.asked.items()), frozenset(model.told.items()), frozenset(model.place.items()),
        )  # fmt: skip
        if state in seen:
            continue
        seen.add(state)
        if len(history) < depth:
            queue.extend((*history, event) for event in model.events())
        model.finish()
    assert len(seen) > 100


@given(st.integers(1, 5), st.integers(0, 2), st.data())
def test_w3_drawn_orders_of_events_do_too(size: int, joiners: int, data: st.DataObject) -> None:
    model = Model(size, joiners)
    for _ in range(data.draw(st.integers(0, 40))):
        events = sorted(model.events())
        if not events:
            break
        model.do(*data.draw(st.sampled_from(events)))
    model.finish()


def test_w3_what_a_rank_says_of_a_generation_that_is_over_is_no_news() -> None:
    machine = Regrouping(3)
    for rank in range(3):
        machine.joined(0, rank)
    assert machine.left(0, 1, "killed") == []
    assert machine.ask(0, 0) == []
    form, admit = machine.ask(2, 0)
    assert isinstance(admit, Admit)
    assert form == Form(admit.generation)
    assert admit.generation.previous == (0, 2)
    machine.joined(1, 0)
    machine.joined(1, 1)
    assert (machine.current.number, machine.forming) == (1, None)
    for late in (machine.left(0, 0, "bye"), machine.left(0, 2, "bye"), machine.joined(0, 1), machine.left(7, 0, "")):
        assert late == []
    assert machine.present == {0, 1}
    assert "generation 1 without this rank" in machine.outside(0, 0)


def test_w3_ranks_that_want_different_things_are_told_so() -> None:
    machine = Regrouping(2)
    for rank in range(2):
        machine.joined(0, rank)
    machine.ask(0, 2)
    (refuse,) = machine.ask(1, 0)
    assert isinstance(refuse, Refuse)
    assert refuse.kind is Refusal.DISAGREE
    assert refuse.why == "ranks disagree on the number of new ranks: rank 0: 2; rank 1: 0"
    assert not machine.asked


def test_w3_a_stale_question_does_not_take_the_place_of_one_that_counts() -> None:
    """Rank 1 of an old session asks while the new rank 1 waits for its answer."""

    class NoSessions:
        def form(self, generation: Any, members: Any) -> str:
            return f"at {generation.number}"

        def cancel(self, generation: Any, why: str) -> None:
            raise AssertionError

    generations = Generations(2, NoSessions())
    told: list[Any] = []

    def reply(name: str) -> Any:
        return lambda value, error: told.append((name, value))

    first, again = GenerationMembers(generations), GenerationMembers(generations, 1)
    for members in (first, again):
        for rank in range(2):
            members.joined(rank)
        if members is first:
            for rank in range(2):
                members.ask(rank, 0, reply(f"old {rank}"))
    assert [(name, value["where"]) for name, value in told] == [("old 0", "at 1"), ("old 1", "at 1")]
    told.clear()
    again.ask(1, 0, reply("new 1"))
    first.ask(1, 0, reply("stale 1"))
    again.ask(0, 0, reply("new 0"))
    assert [(name, value.get("where", value.get("refused"))) for name, value in told] == [
        ("stale 1", "outside"), ("new 0", "at 2"), ("new 1", "at 2"),
    ]  # fmt: skip


def test_w3_those_who_are_waited_for_are_others_and_of_this_generation() -> None:
    """An answer may be in flight when a rank asks for the late ranks: the rank would name itself."""
    machine = Regrouping(3)
    for rank in range(3):
        machine.joined(0, rank)
    machine.ask(0, 0)
    late = "it has not asked to regroup"
    assert machine.missing(0, 0) == {1: late, 2: late}
    assert machine.missing(0, 1) == {}
    machine.ask(1, 0)
    assert machine.missing(0, 1) == {2: late}
    machine.ask(2, 0)
    assert machine.missing(0, 2) == {}
    for rank in range(3):
        machine.joined(1, rank)
    assert machine.missing(0, 1) == {}
    assert machine.missing(1, 1) == {}  # it may still open the new world
    machine.ask(1, 1)
    assert machine.missing(1, 1) == {0: late, 2: late}


def test_w3_one_that_was_started_is_not_taken_for_one_that_has_not_asked() -> None:
    """A single rank starts a second one, and waits for it until it joins, but not while both open the world."""
    machine = Regrouping(1)
    machine.joined(0, 0)
    machine.ask(0, 1)
    assert machine.missing(0, 0) == {1: "it was started, and has not joined yet"}
    machine.joined(1, 1)
    assert machine.missing(0, 0) == {}
    machine.joined(1, 0)
    assert machine.missing(0, 0) == machine.missing(1, 0) == {}

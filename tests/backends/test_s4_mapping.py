"""S4: whose memory is mapped where: never a stale mapping, also when freed, resized or made again at one address."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count, repeat
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist.backends.cuda_ipc import Loan
from aiodist.backends.cuda_ipc import mapping as mapping_module
from aiodist.errors import BackendError, MismatchError
from aiodist.testing.seams.cuda import Mapper, Mappings
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_mapper import SimulatedMapper

CPU = torch.device("cpu")
Said = bytearray  # the frame of an announcement


class Pair:
    """Rank 0 lends, rank 1 borrows."""

    def __init__(self) -> None:
        self.mapper = SimulatedMapper()
        self.lender = Mappings(self.mapper)
        self.borrower = Mappings(self.mapper)

    def say(self, t: Tensor) -> tuple[Loan, Said]:
        loan = Loan(self.lender, t)
        return loan, loan.announce(1)

    def receive(self, said: Said, like: Tensor) -> tuple[Loan, Tensor]:
        loan = Loan(self.borrower, torch.empty(0, dtype=like.dtype))
        loan.receive(0, said, like.numel())
        seen = loan.tensor(0)
        loan.release()
        return loan, seen

    def look(self) -> None:
        """Find what died, and tell rank 1, as is done now and then."""
        for numbers in self.lender.collect_dead().values():
            self.borrower.release(0, numbers)

    def lend(self, t: Tensor) -> Tensor:
        """Return a copy of `t` as rank 1 sees it, after a whole loan."""
        lending, said = self.say(t)
        borrowing, seen = self.receive(said, t)
        copied = seen.clone()
        del seen
        lending.end()
        borrowing.end()
        return copied


def test_s4_another_tensor_at_the_same_address_is_another() -> None:
    pair = Pair()
    memory = bytearray(64)  # all tensors of it are at one address
    for round_, (n, kind) in enumerate([(8, torch.float64), (4, torch.float64), (16, torch.int32), (64, torch.uint8)]):
        t = torch.frombuffer(memory, dtype=kind, count=n)
        t.fill_(round_ + 1)
        assert torch.equal(pair.lend(t), t)
        assert pair.mapper.exported == round_ + 1, "an old description was taken for a new tensor"
        address = t.data_ptr()
        del t
    assert torch.frombuffer(memory, dtype=torch.uint8).data_ptr() == address
    assert len(pair.lender.lent) == len(pair.borrower.borrowed) == 1


def test_s4_views_of_one_storage_share_a_mapping() -> None:
    pair = Pair()
    t = torch.arange(100, dtype=torch.float32)
    for part in (t, t[10:20], t[99:], t.view(torch.int32)[5:], t.view(10, 10)[3]):
        assert torch.equal(pair.lend(part), part)
    assert pair.mapper.exported == 1


def test_s4_a_resized_storage_is_described_anew() -> None:
    pair = Pair()
    t = torch.ones(1000)
    pair.lend(t)
    t.untyped_storage().resize_(0)
    t.untyped_storage().resize_(400_000)
    t.set_(t.untyped_storage(), 0, (100_000,))  # type: ignore[call-overload]
    t.fill_(3)
    assert torch.equal(pair.lend(t), t)
    assert pair.mapper.exported == 2
    assert len(pair.borrower.borrowed) == 1


def test_s4_a_storage_that_is_resized_while_a_loan_uses_it_goes_with_the_loan() -> None:
    pair = Pair()
    t = torch.ones(1000)
    late, said = pair.say(t)  # on its way
    pair.lend(t)
    t.untyped_storage().resize_(400_000)
    t.fill_(2)
    pair.lend(t)
    assert len(pair.borrower.borrowed) == 2
    loan, _ = pair.receive(said, t)  # what it names has not been let go of
    loan.end()
    late.end()
    pair.lend(t)
    assert len(pair.borrower.borrowed) == len(pair.mapper.opened) == 1


def test_s4_what_died_is_let_go_of_when_another_storage_is_lent() -> None:
    pair = Pair()
    kept, dying = torch.ones(3), torch.ones(4)
    pair.lend(kept)
    pair.lend(dying)
    assert len(pair.mapper.opened) == 2
    del dying
    gc.collect()
    pair.lend(kept)
    assert len(pair.mapper.opened) == 2  # no rank was notified: known memory is lent without a check of the others
    pair.lend(torch.ones(5))
    assert len(pair.mapper.opened) == len(pair.lender.lent) == 2
    pair.look()
    assert len(pair.mapper.opened) == len(pair.lender.lent) == 1


def test_s4_an_announcement_tells_of_as_much_that_died_as_it_has_room_for() -> None:
    pair = Pair()
    dying = [torch.ones(3 + i) for i in range(20)]
    for t in dying:
        pair.lend(t)
    del dying, t
    kept, left = [torch.ones(30 + i) for i in range(3)], []
    for t in kept:
        pair.lend(t)
        left.append(len(pair.mapper.opened))
    assert left == [20 - 8 + 1, 20 - 16 + 2, 3]


def test_s4_memory_that_a_living_storage_gave_up_is_let_go_of() -> None:
    pair = Pair()
    kept, given_up, grown = torch.ones(3), torch.ones(4), torch.ones(5)
    for t in (kept, given_up, grown):
        pair.lend(t)
    given_up.untyped_storage().resize_(0)
    grown.untyped_storage().resize_(4000)
    pair.look()
    assert len(pair.mapper.opened) == 1
    given_up.untyped_storage().resize_(16)
    assert torch.equal(pair.lend(given_up.fill_(2)), given_up)
    assert torch.equal(pair.lend(grown.fill_(3)), grown)


def test_s4_among_many_all_that_died_are_found_in_the_end() -> None:
    pair = Pair()
    kept = [torch.full((2,), float(i)) for i in range(100)]
    dying = [torch.full((3,), float(i)) for i in range(100)]
    for one, other in zip(kept, dying, strict=True):
        pair.lend(one)
        pair.lend(other)
    del dying, other
    pair.look()
    assert len(pair.lender.lent) == len(pair.mapper.opened) == 100


def test_s4_what_is_dead_for_the_others_stays_while_my_loan_uses_it() -> None:
    pair = Pair()
    t, other = torch.ones(3), torch.ones(4)
    lending, said = pair.say(t)
    loan, seen = pair.receive(said, t)
    lending.end()
    del t, lending, seen
    pair.lend(other)
    assert len(pair.mapper.opened) == 2
    loan.end()
    assert len(pair.mapper.opened) == 1


@pytest.mark.thorough
def test_s4_what_lives_is_described_once_however_much_there_is() -> None:
    """Each description of a storage stays with it for as long as it lives."""
    pair = Pair()
    ts = [torch.full((2,), float(i)) for i in range(2000)]
    for _ in range(3):
        for t in ts:
            pair.lend(t)
        assert pair.mapper.exported == len(pair.mapper.opened) == len(ts)
    del ts[1:], t
    pair.look()
    assert len(pair.lender.lent) == len(pair.mapper.opened) == 1


def test_s4_two_loans_in_flight_are_understood_in_either_order() -> None:
    pair = Pair()
    t = torch.arange(5)
    one, first = pair.say(t)
    other, second = pair.say(t)
    loan, seen = pair.receive(second, t)  # the first announcement has not come
    assert torch.equal(seen, t)
    late, seen = pair.receive(first, t)
    assert torch.equal(seen, t)
    assert pair.mapper.exported == 1
    for each in (one, other, loan, late):
        each.end()
    _, short = pair.say(t)
    assert first[0] == second[0] == 1
    assert short[0] == 0, "the description travels though it is known"


def test_s4_a_failed_loan_keeps_what_it_used() -> None:
    pair = Pair()
    t = torch.ones(3)
    loan, said = pair.say(t)
    del t, loan  # it never ends
    gc.collect()
    for i in range(5):
        pair.lend(torch.full((2,), float(i)))
    with pytest.raises(BackendError, match="gone"):
        pair.receive(said, torch.ones(3))


def test_s4_disagreement_is_told_and_leaves_the_mapping_in_order() -> None:
    pair = Pair()
    t = torch.ones(3)
    loan, said = pair.say(t)
    for like in (torch.ones(4), torch.ones(3).double()):
        hearing = Loan(pair.borrower, like)
        with pytest.raises(MismatchError, match="rank 0: 3 float32; expected"):
            hearing.receive(0, said, like.numel())
        hearing.end()
    loan.end()
    assert torch.equal(pair.lend(t), t)


def test_s4_what_was_announced_but_never_opened_is_discarded() -> None:
    pair = Pair()
    t = torch.ones(3)
    loan, said = pair.say(t)
    hearing = Loan(pair.borrower, t)
    hearing.receive(0, said, 3)
    hearing.end()
    loan.end()
    lent = pair.lender.lend(t)
    pair.lender.release_loan(lent)
    del t
    other = torch.ones(2)
    pair.borrower.release(0, [lent.number])
    with pytest.raises(AssertionError, match="once"):
        pair.mapper.open(lent.descriptions[1], CPU)
    pair.lend(other)


async def test_s4_closing_lets_go_of_everything() -> None:
    pair = Pair()
    ts = [torch.ones(i + 1) for i in range(4)]
    for t in ts:
        pair.lend(t)
    assert len(pair.mapper.opened) == 4
    await pair.borrower.aclose()
    assert not pair.mapper.opened
    await pair.lender.aclose()
    loan = Loan(pair.lender, ts[0])
    refused = loan.announce(1)
    with pytest.raises(BackendError, match="closed"):
        Loan(Mappings(pair.mapper), ts[0]).receive(0, refused, 1)


async def test_s4_closing_leaves_what_a_loan_still_uses() -> None:
    """Kernels of mine may be queued in it: its rank died, and I was to wait for them no more."""
    pair = Pair()
    kept, used = torch.ones(3), torch.ones(4)
    pair.lend(kept)
    pair.lend(used)
    lending, said = pair.say(used)
    loan, seen = pair.receive(said, used)
    await pair.borrower.aclose()
    assert len(pair.mapper.opened) == 1
    assert torch.equal(seen, used)
    loan.end()
    lending.end()


def test_s4_what_was_described_stays_while_the_default_stream_reads_it(simulated_cuda: SimulatedCuda) -> None:
    """Torch records no readers of memory after its description, so the default stream is recorded before."""
    pair = Pair()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for reader in (torch.cuda.default_stream(), other):
        with torch.cuda.stream(side):
            t = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        pair.say(t)[0].end()
        t.record_stream(reader)
        with simulated_cuda.paused(reader), torch.cuda.stream(reader):
            copied = t.clone()
            del t
            for stream in {side, other, torch.cuda.default_stream()} - {reader}:
                stream.synchronize()  # all recorded streams are finished: the memory is used again
        torch.cuda.synchronize()
        assert bool(simulated_cuda.hazards) == (reader == other)
        assert bool(copied.isnan().any()) == (reader == other)
    simulated_cuda.hazards.clear()


@pytest.mark.parametrize("seed", range(20))
def test_s4_any_order_of_loans_deaths_and_messages(seed: int) -> None:
    """Tensors of any size at few addresses, messages of loans in flight in any order: what is seen is right."""
    chance = random.Random(seed)
    pair = Pair()
    places = [bytearray(64) for _ in range(3)]
    living: dict[int, Tensor] = {}
    under_way: list[tuple[Loan, Said, Tensor]] = []
    for step in range(200):
        place = chance.randrange(3)
        match chance.randrange(5):
            case 0 | 1:
                if not any(t.data_ptr() == _address(places[place]) for _, _, t in under_way):
                    living.pop(place, None)
                    living[place] = torch.frombuffer(places[place], dtype=torch.uint8, count=chance.randint(1, 64))
                    living[place].fill_(step)
            case 2 | 3:
                if place in living:
                    t = living[place]
                    start = chance.randrange(t.numel())
                    under_way.append((*pair.say(t[start:]), t[start:]))
            case 4:
                if under_way:
                    lending, said, t = under_way.pop(chance.randrange(len(under_way)))
                    borrowing, seen = pair.receive(said, t)
                    assert torch.equal(seen, t), (seed, step)
                    del seen
                    borrowing.end()
                    lending.end()
    assert len(pair.mapper.opened) == len(pair.borrower.borrowed)


def _address(memory: bytearray) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


# --- torch's sharing, with the parts of a CUDA build replaced -------------------------------------------------------


class Lent:
    """A tensor whose storage can be shared."""

    device = torch.device("cuda:1")

    def __init__(self, t: Tensor) -> None:
        self._storage = t.untyped_storage()

    def untyped_storage(self) -> Any:
        return self

    @property
    def _cdata(self) -> int:
        return int(self._storage._cdata)

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 1, b"handle", 40, 512, b"/torch_counters", 7, b"event", True


class Shared:
    """Calls of torch's storage sharing."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.released: list[tuple[Any, ...]] = []

    @staticmethod
    def described(t: Tensor) -> bytes:
        lent: Any = Lent(t)
        return Mapper().export(lent)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    seen = Shared()

    class Storage:
        @staticmethod
        def _release_ipc_counter(*args: Any) -> None:
            seen.released.append(args)

        @staticmethod
        def _new_shared_cuda(*args: Any) -> torch.UntypedStorage:
            seen.made.append(args)
            return torch.arange(args[2], dtype=torch.uint8).untyped_storage()

        @staticmethod
        def _new_with_weak_ptr(cdata: int) -> Any:
            return plain._new_with_weak_ptr(cdata)

    plain = torch.UntypedStorage
    monkeypatch.setattr(torch, "UntypedStorage", Storage)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("_", (), {"uuid": f"GPU-{index}"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return seen


def test_s4_torch_maps_memory_of_another_process_on_my_device(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.zeros(10)
    description = shared.described(t)
    assert len(description) < 400  # so that a frame has room for it
    monkeypatch.setattr(mapping_module, "this_process", lambda: (0, 0))
    monkeypatch.setattr(mapping_module, "flat", lambda storage, device: torch.empty(0, dtype=torch.uint8).set_(storage))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"idle on {device}")
    entered: list[object] = []

    @contextmanager
    def entering(stream: object) -> Iterator[None]:
        entered.append(stream)
        yield

    monkeypatch.setattr(mapping_module, "OnStream", entering)
    mapped = Mapper().open(description, torch.device("cuda:1"))
    # The counter is this mapping's; the event is not waited for: ranks synchronise on the host.
    assert shared.made == [(1, b"handle", 40, 512, b"/torch_counters", 7, b"event", False)]
    assert torch.equal(mapped.memory(), torch.arange(40, dtype=torch.uint8))
    mapped.close()
    assert entered == ["idle on cuda:1"]
    with pytest.raises(BackendError, match="its mapping was closed"):
        mapped.memory()
    assert not shared.released


def opened_elsewhere(monkeypatch: pytest.MonkeyPatch, query: Callable[[], bool]) -> Mapper:
    """Return a mapper for which all descriptions are of another process, and its stream's `query`."""
    monkeypatch.setattr(mapping_module, "this_process", partial(next, zip(repeat(0), count())))
    monkeypatch.setattr(mapping_module, "flat", lambda storage, device: torch.empty(0, dtype=torch.uint8).set_(storage))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: type("_", (), {"query": staticmethod(query)}))
    monkeypatch.setattr(mapping_module, "OnStream", lambda stream: nullcontext())
    return Mapper()


def test_s4_torch_opens_an_allocation_for_one_device(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows by its handle alone what is open: another storage in it would be given the first one's mapping."""
    mapper = opened_elsewhere(monkeypatch, lambda: True)
    one, other = shared.described(torch.zeros(10)), shared.described(torch.zeros(5))
    first = mapper.open(one, torch.device("cuda:1"))
    second = mapper.open(other, torch.device("cuda:1"))
    with pytest.raises(BackendError, match="mapped on cuda:1: it cannot be on cuda:0"):
        mapper.open(shared.described(torch.zeros(3)), torch.device("cuda:0"))
    first.close()
    with pytest.raises(BackendError, match="mapped on cuda:1"):
        mapper.open(shared.described(torch.zeros(3)), torch.device("cuda:0"))
    second.close()
    mapper.open(shared.described(torch.zeros(3)), torch.device("cuda:0"))


def test_s4_torch_takes_what_the_process_has_itself_as_it_is(shared: Shared) -> None:
    t = torch.arange(4, dtype=torch.uint8)
    mapped = Mapper().open(shared.described(t), CPU)
    assert mapped.memory().data_ptr() == t.data_ptr()
    assert shared.released == [(b"/torch_counters", 7)]
    assert not shared.made
    del t
    gc.collect()
    with pytest.raises(BackendError, match="was freed"):
        mapped.memory()


def test_s4_memory_that_cannot_be_shared_is_refused_with_the_remedy() -> None:
    with pytest.raises(BackendError, match=r"cannot be exported.*staged"):
        Mapper().export(torch.ones(3))

"""P10: codecs between ranks: what is pushed with error feedback, what is pulled as differences, and their order."""

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from aiodist import Communicator, ParameterServer
from aiodist.codecs import QSGD, Codec, Half, Lossless, TopK
from aiodist.errors import RemoteError
from aiodist.ps import SGD, Synchronous
from aiodist.testing.seams.carriers import LocalTransport
from aiodist.testing.seams.progress import transport_lock
from tests.ps.left_out import Remembering
from tests.support.until import until

SMALL, LARGE = 100, 70_000  # elements; the large ones are encoded in the service thread
SECONDS = 20.0
CODECS = [Half(), TopK(0.05), QSGD(bits=4), Lossless()]


@pytest.fixture(params=CODECS, ids=lambda codec: type(codec).__name__)
def codec(request: pytest.FixtureRequest) -> Codec:
    chosen: Codec = request.param
    return chosen


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sent(codec: Codec, t: Tensor) -> Tensor:
    return codec.decode(codec.encode(t), t.dtype, t.numel())


# --- pushes ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p10_what_is_at_the_server_and_what_is_left_are_what_was_pushed(
    coll: Communicator, codec: Codec, numel: int, split: bool
) -> None:
    first, seen, split_bytes = draw(numel, 99), Remembering(codec), 64 if split else 1 << 30
    async with ParameterServer(coll, {"w": first.clone()}, codec=seen, split_bytes=split_bytes) as ps:
        pushed = torch.zeros(numel, dtype=torch.float64)
        for step in range(6 if numel == LARGE else 12):
            value = draw(numel, 10 * step + coll.rank)
            pushed += value
            await ps.push("w", value, timeout=SECONDS)
        await ps.barrier()
        expected = await coll.allreduce(pushed - seen.residual(ps, "w", first, split_bytes))
        found = await ps.pull("w", timeout=SECONDS)
        torch.testing.assert_close(found, first + expected, rtol=0, atol=1e-6)
        await ps.barrier()


@pytest.mark.drawn(1)
@pytest.mark.ranks(2, backend="mpi")
@pytest.mark.ranks(2, backend="gloo")
async def test_p10_codes_travel_between_processes(coll: Communicator) -> None:
    codec = Remembering(TopK(0.2))
    async with ParameterServer(
        coll, {"w": torch.zeros(LARGE), "v": torch.zeros(SMALL)}, codec=codec, pull_codec=Half(), split_bytes=1000
    ) as ps:
        total = {"w": torch.zeros(LARGE), "v": torch.zeros(SMALL)}
        for step in range(5):
            for name, t in total.items():
                value = draw(t.numel(), 10 * step + coll.rank, torch.float32)
                t += value
                ps.push(name, value)
            reads = [ps.pull(name, torch.empty_like(t)) for name, t in total.items() for _ in range(3)]
            await asyncio.wait_for(asyncio.gather(*reads), SECONDS)
        await ps.sync(timeout=SECONDS)
        await ps.barrier()
        for name, t in total.items():
            expected = await coll.allreduce(t - codec.residual(ps, name, t, 1000))
            for _ in range(3):
                found = await ps.pull(name, timeout=SECONDS)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_p10_requests_after_a_large_push_keep_their_order(coll: Communicator, split: bool) -> None:
    w, v = torch.zeros(LARGE), torch.zeros(SMALL)
    async with ParameterServer(coll, {"w": w, "v": v}, codec=Half(), split_bytes=64 if split else 1 << 30) as ps:
        if coll.rank == 0:
            ones, twos, small = torch.ones(LARGE), 2 * torch.ones(LARGE), torch.ones(SMALL)
            reads, pushes = [], []
            for i in range(1, 4):
                pushes += [ps.push("w", ones), ps.push("w", twos), ps.push("v", small)]
                small.fill_(7.0)  # small ones are copied at the call
                small = torch.ones(SMALL)
                reads.append((i, ps.pull("w", torch.empty(LARGE)), ps.pull("v", torch.empty(SMALL))))
            for i, large, little in reads:
                assert torch.equal(await asyncio.wait_for(large, SECONDS), 3.0 * i * torch.ones(LARGE))
                assert torch.equal(await asyncio.wait_for(little, SECONDS), i * torch.ones(SMALL))
            await asyncio.wait_for(asyncio.gather(*pushes), SECONDS)
        await ps.barrier()


@pytest.mark.ranks(2)
async def test_p10_integers_and_complex_numbers_pass_as_they_are(coll: Communicator) -> None:
    tensors = {
        str(dtype): torch.arange(SMALL).to(dtype)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128)
    }
    async with ParameterServer(coll, tensors, codec=TopK(0.01), pull_codec=TopK(0.01)) as ps:
        for name, t in tensors.items():
            await ps.push(name, torch.full_like(t, 3))
        await ps.barrier()
        for name, t in tensors.items():
            found = await ps.pull(name, torch.empty_like(t))
            assert torch.equal(found, torch.arange(SMALL).to(t.dtype) + 6)
        statistics = ps.statistics()
        own = sum(t.nbytes for name, t in tensors.items() if place_of(ps, name) == coll.rank)
        assert statistics.push_sent_bytes == statistics.push_bytes - own > 0
        await ps.barrier()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
async def test_p10_synchronous_steps_of_a_server_side_optimizer_take_codes(
    coll: Communicator, codec: Codec, reduction: Any, numel: int
) -> None:
    consistency, seen = Synchronous(reduction), Remembering(codec)
    async with ParameterServer(
        coll, {"w": torch.zeros(numel, dtype=torch.float64)}, rule=SGD(lr=0.5), consistency=consistency, codec=seen
    ) as ps:
        gradients = torch.zeros(numel, dtype=torch.float64)
        for step in range(4):
            gradient = draw(numel, 10 * step + coll.rank)
            gradients += gradient
            await ps.push_pull("w", gradient, timeout=SECONDS)
        total = await coll.allreduce(gradients - seen.residual(ps, "w", gradients, 1 << 20))
        found = await ps.pull("w", timeout=SECONDS)
        expected = -0.5 * total / (3 if reduction == "mean" else 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p10_rules_that_are_no_sums_do_without_feedback(coll: Communicator, codec: Codec, numel: int) -> None:
    seen = Remembering(codec)
    async with ParameterServer(coll, None, codec=seen, split_bytes=1 << 30) as ps:
        name = next(str(i) for i in range(99) if place_of(ps, str(i)) == 1)
        await ps.init(name, torch.full((numel,), 2.0))
        if coll.rank == 0:
            rules: dict[str, Callable[[Tensor, Tensor], Tensor]]
            rules = {"copy": lambda _, t: t, "mul": torch.mul, "max": torch.maximum}
            for rule, operator in rules.items():
                for seed in range(3):
                    before = await ps.pull(name, torch.empty(numel))
                    value = draw(numel, seed, torch.float32)
                    at_once = [ps.push(name, value, rule=rule), ps.pull(name, torch.empty(numel))]
                    _, after = await asyncio.wait_for(asyncio.gather(*at_once), SECONDS)
                    if not isinstance(codec, QSGD):  # with new random numbers
                        assert torch.equal(after, operator(before, sent(codec, value)))
                    assert torch.equal(seen.given[-1], value)
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("rule", ["copy", "zero"])
async def test_p10_what_replaces_a_tensor_ends_what_was_left_of_sums(coll: Communicator, numel: int, rule: str) -> None:
    half = Remembering(TopK(0.5))
    async with ParameterServer(coll, None, codec=half, split_bytes=1 << 30) as ps:
        name = next(str(i) for i in range(99) if place_of(ps, str(i)) == 1)
        await ps.init(name, torch.zeros(numel))
        if coll.rank == 0:
            value = draw(numel, 1, torch.float32)
            pushes = [ps.push(name, value), ps.push(name, value, rule=rule), ps.push(name, value)]
            await asyncio.wait_for(asyncio.gather(*pushes), SECONDS)
            once = sent(half, value)
            assert torch.equal(await ps.pull(name), once + once if rule == "copy" else once)
            assert torch.equal(half.left[-1], value - once)
        await ps.barrier()


def place_of(ps: ParameterServer, name: str) -> int:
    """Return the rank on which a small tensor of that name lies."""
    from aiodist.ps.settings import place

    return place(name, 1, 4, ps.servers, 1 << 30)[0].rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p10_what_is_left_is_kept_in_what_was_weighted(coll: Communicator, codec: Codec, numel: int) -> None:
    first, seen = torch.zeros(numel, dtype=torch.float64), Remembering(codec)
    async with ParameterServer(coll, {"w": first}, rule="axpy", codec=seen, split_bytes=64) as ps:
        total = torch.zeros(numel, dtype=torch.float64)
        for step, alpha in enumerate([1.0, -0.1, 7.0, 0.5]):
            value = draw(numel, 10 * step + coll.rank)
            total += alpha * value
            await ps.push("w", value, alpha=alpha, timeout=SECONDS)
        await ps.barrier()
        expected = await coll.allreduce(total - seen.residual(ps, "w", total, 64))
        torch.testing.assert_close(await ps.pull("w"), expected, rtol=0, atol=1e-6)
        await ps.barrier()


@pytest.mark.ranks(1)
async def test_p10_a_rank_pushes_to_itself_and_reads_itself_without_codes(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(LARGE)}, codec=TopK(0.01), pull_codec=TopK(0.01)) as ps:
        value = draw(LARGE, 1, torch.float32)
        assert torch.equal(await ps.push_pull("w", value), value)
        assert torch.equal(await ps.push_pull("w", value), 2 * value)
        statistics = ps.statistics()
        assert (statistics.encode_seconds, statistics.decode_seconds) == (0.0, 0.0)
        assert (statistics.push_sent_bytes, statistics.pull_received_bytes) == (0, 0)


# --- what fails --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing:
    """Half precision, with errors in chosen calls."""

    encodes: list[Exception] = field(default_factory=list, repr=False)
    decodes: list[Exception] = field(default_factory=list, repr=False)
    codes: list[Tensor] = field(default_factory=list, repr=False)
    """Given out once, in place of the code of ones, by a rank that does not notice."""
    given: list[Tensor] = field(default_factory=list, repr=False)

    def encode(self, t: Tensor) -> Tensor:
        if self.encodes:
            raise self.encodes.pop()
        if self.codes:
            self.given.append(self.codes.pop())
            return self.given[-1]
        return Half().encode(t)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        if self.decodes:
            raise self.decodes.pop()
        if any(code is one for one in self.given):
            return torch.ones(numel, dtype=dtype)
        return Half().decode(code, dtype, numel)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p10_a_push_raises_the_error_of_its_encoder_and_changes_nothing(coll: Communicator, numel: int) -> None:
    mine = Failing()
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, codec=mine) as ps:
        if ps.is_worker:
            await ps.push("w", torch.ones(numel))
            mine.encodes.append(ValueError("no code today"))
            with pytest.raises(ValueError, match="no code today"):
                await ps.push("w", torch.ones(numel), timeout=SECONDS)
            await ps.sync(timeout=SECONDS)
            await ps.push("w", torch.ones(numel), timeout=SECONDS)
            assert torch.equal(await ps.pull("w"), 2 * torch.ones(numel))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("damage", ["short", "other kind", "other numel", "empty"])
async def test_p10_a_code_of_wrong_size_is_an_error_of_its_push_alone(
    coll: Communicator, damage: str, numel: int
) -> None:
    mine = Failing()
    codes = {
        "short": lambda: Half().encode(torch.ones(numel))[:-1].clone(),
        "other kind": lambda: TopK(0.1).encode(torch.ones(numel)),
        "other numel": lambda: Half().encode(torch.ones(numel + 1)),
        "empty": lambda: torch.empty(0, dtype=torch.uint8),
    }
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, codec=mine) as ps:
        if ps.is_worker:
            await ps.push("w", torch.ones(numel))
            mine.codes.append(codes[damage]())
            with pytest.raises(RemoteError, match="server 1 raised ValueError: a code"):
                await ps.push("w", torch.ones(numel), timeout=SECONDS)
            assert torch.equal(await ps.pull("w"), torch.ones(numel))
            await ps.push("w", torch.ones(numel), timeout=SECONDS)
            assert torch.equal(await ps.pull("w"), 2 * torch.ones(numel))
        await coll.barrier()
        if ps.is_server:
            statistics = ps.statistics()
            assert statistics.applied == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("side", ["server", "client"])
async def test_p10_a_pull_raises_the_error_of_its_codec_and_the_next_succeeds(
    coll: Communicator, side: str, numel: int
) -> None:
    mine = Failing()
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, pull_codec=mine) as ps:
        if ps.is_worker:
            await ps.push("w", torch.ones(numel))
            await ps.pull("w")
            await coll.barrier()
            await coll.barrier()
            out = torch.full((numel,), 5.0)
            if side == "client":
                mine.decodes.append(ValueError("not today"))
            with pytest.raises(RemoteError if side == "server" else ValueError, match="not today"):
                await ps.pull("w", out, timeout=SECONDS)
            assert torch.equal(out, torch.full((numel,), 5.0))
            if side == "server":  # a client that has lost one cannot follow
                assert torch.equal(await ps.pull("w", out, timeout=SECONDS), torch.ones(numel))
            await ps.push("w", torch.ones(numel), timeout=SECONDS)
            read = await ps.pull("w", out, reads="lock-free", timeout=SECONDS)
            assert torch.equal(read, 2 * torch.ones(numel))
        else:
            await coll.barrier()
            if side == "server":
                mine.encodes.append(ValueError("not today"))
            await coll.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_h7_a_push_raises_the_error_of_its_decoder_and_the_next_succeeds(coll: Communicator, numel: int) -> None:
    mine = Failing()
    async with ParameterServer(coll, {"w": torch.zeros(numel)}, servers=1, codec=mine) as ps:
        if ps.is_server:
            mine.decodes.append(RuntimeError("torn"))
        await coll.barrier()
        if ps.is_worker:
            with pytest.raises(RemoteError, match="server 1 raised RuntimeError: torn"):
                await ps.push("w", torch.ones(numel), timeout=SECONDS)
            await ps.push("w", torch.ones(numel), timeout=SECONDS)
            assert torch.equal(await ps.pull("w"), torch.ones(numel))


# --- pulls -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(3)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
async def test_p10_lossless_pulls_are_what_the_server_has(coll: Communicator, numel: int, split: bool) -> None:
    codec = Lossless()
    async with ParameterServer(
        coll, {"w": draw(numel, 3, torch.float32)}, pull_codec=codec, split_bytes=64 if split else 1 << 30
    ) as ps:
        for step in range(4):
            await ps.push("w", draw(numel, 10 * step + coll.rank, torch.float32), timeout=SECONDS)
            await ps.barrier()
            found = await ps.pull("w", torch.empty(numel), timeout=SECONDS)
            exact = await ps.pull("w", torch.empty(numel), reads="lock-free", timeout=SECONDS)
            torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)  # one rounding of an addition
            await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, LARGE])
async def test_p10_coded_pulls_converge_to_the_tensor_of_the_server(coll: Communicator, numel: int) -> None:
    first = draw(numel, 3, torch.float32)
    async with ParameterServer(coll, {"w": first}, servers=1, pull_codec=TopK(0.26)) as ps:
        if ps.is_worker:
            await ps.push("w", draw(numel, 4, torch.float32))
            exact = await ps.pull("w", torch.empty(numel), reads="lock-free")
            outs = [torch.full((numel,), 9.0), torch.zeros(numel), first]
            missing = []
            for i in range(5):
                found = await ps.pull("w", outs[i % 3], timeout=SECONDS)
                missing.append(int((found - exact).abs().gt(1e-5).sum()))
            assert missing[0] > missing[1] > missing[2] > 0 == missing[4]


@pytest.mark.ranks(2)
async def test_p10_reads_that_are_lock_free_and_of_the_own_rank_are_exact(coll: Communicator) -> None:
    tensors = {str(i): draw(SMALL, i, torch.float32) for i in range(8)}
    async with ParameterServer(coll, tensors, pull_codec=TopK(0.01)) as ps:
        added = torch.ones(SMALL)
        for name in tensors:
            await ps.push(name, added)
        await ps.barrier()
        for i, name in enumerate(tensors):
            expected = draw(SMALL, i, torch.float32) + added + added
            assert torch.equal(await ps.pull(name, torch.empty(SMALL), reads="lock-free"), expected)
            own = place_of(ps, name) == coll.rank
            assert torch.equal(await ps.pull(name, torch.empty(SMALL)), expected) == own
        assert {place_of(ps, name) for name in tensors} == {0, 1}
        await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("numel", [SMALL, 20_000, LARGE])
async def test_p10_codes_are_decoded_in_the_order_in_which_they_were_made(
    coll: Communicator, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    # The first pull is whole, in a message of its own; the later ones are small and overtake it.
    held: list[Callable[[], None]] = []
    isend = LocalTransport.isend

    def later(transport: LocalTransport, t: Tensor, dst: int, tag: int, done: Any) -> None:
        send = partial(isend, transport, t, dst, tag, done)
        held.append(send) if numel > SMALL and t.nbytes > 4 * numel else send()

    async with ParameterServer(coll, servers=1, pull_codec=TopK(0.01)) as ps:
        if ps.is_worker:
            await ps.init("w", torch.zeros(numel))
            value = draw(numel, 1, torch.float32)
            await ps.push("w", value)
            monkeypatch.setattr(LocalTransport, "isend", later)
            reads = [ps.pull("w", torch.empty(numel)) for _ in range(6)]
            code = 16 + TopK(0.01).encode(value).nbytes
            received = value.nbytes + 5 * code
            await until(lambda: ps.statistics().pull_received_bytes >= received and (numel <= SMALL or held))
            monkeypatch.undo()
            assert not any(read.done() for read in reads) or numel == SMALL
            with transport_lock:
                for send in held:
                    send()
            for found in await asyncio.wait_for(asyncio.gather(*reads), SECONDS):
                assert torch.equal(found, value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("other", [0, 1])
async def test_p10_a_name_that_is_used_anew_begins_anew(coll: Communicator, other: int) -> None:
    top, numels = Remembering(TopK(0.5)), (2345, 2345 + other)
    async with ParameterServer(coll, codec=top, pull_codec=top, servers=1) as ps:
        if ps.is_worker:
            for numel in (*numels, numels[0]):
                await ps.init("w", torch.zeros(numel))
                value = draw(numel, 1, torch.float32)
                await ps.push("w", value)
                assert torch.equal(await ps.pull("w"), sent(top, value))
                assert torch.equal(top.residual(ps, "w", value, 1 << 20), value - sent(top, value))
                last = [ps.push("w", value), ps.pull("w")]
                await ps.free("w", timeout=SECONDS)
                await asyncio.wait_for(asyncio.gather(*last), SECONDS)
                del value, last
        await coll.barrier()
        top.given.clear()
        top.left.clear()
        await coll.barrier()
        gc.collect()
        assert not [t for t in gc.get_objects() if type(t) is Tensor and t.numel() in numels]
        await coll.barrier()


@pytest.mark.ranks(2)
async def test_p10_nothing_is_encoded_unless_asked(coll: Communicator) -> None:
    async with ParameterServer(coll, {"w": torch.zeros(LARGE)}, servers=1) as ps:
        if ps.is_worker:
            value = draw(LARGE, 1, torch.float32)
            assert torch.equal(await ps.push_pull("w", value), value)
            statistics = ps.statistics()
            assert statistics.push_sent_bytes == statistics.push_bytes == value.nbytes
            assert (statistics.encode_seconds, statistics.decode_seconds) == (0.0, 0.0)

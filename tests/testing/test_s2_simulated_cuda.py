"""S2: the simulated CUDA device does what CUDA promises and no more, so that code which waits too little is caught."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import aiodist
import aiodist.testing.plugin
from tests.support.simulated_cuda.device import SimulatedCuda
from tests.support.simulated_cuda.simulation import simulated_cuda

pytest_plugins = ["pytester"]

PLUGIN = aiodist.testing.plugin.__name__


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    """Two devices that wait for nothing unless they are paused."""
    with simulated_cuda(devices=2, delay=0.0) as device:
        yield device


def ones(size: int = 8, device: str = "cuda") -> Tensor:
    return torch.ones(size, device=device)


def values(t: Tensor) -> list[float]:
    return sorted(set(t.tolist()))


def eventually(true: Callable[[], object]) -> bool:
    """Ask until it is true, for some seconds at most."""
    return any(true() for _ in range(20_000))


# --- what is computed is queued ----------------------------------------------------------------------------------


def test_s2_simulated_work_is_done_after_the_call_and_in_order(device: SimulatedCuda) -> None:
    with device.paused():
        t = ones() + 1
        t.mul_(3)
        assert not torch.cuda.current_stream().query()
        assert not device.synchronisations
    torch.cuda.synchronize()
    assert torch.cuda.current_stream().query()
    assert values(t) == [6]
    assert device.launches["add"] == device.launches["mul_"] == 1
    assert device.synchronisations == {"device": 1, "implicit": 1}


def test_s2_simulated_another_stream_reads_poison_without_an_event(device: SimulatedCuda) -> None:
    side = torch.cuda.Stream()
    with device.paused(torch.cuda.current_stream()):
        t, numbers = ones() + 1, torch.arange(8, device="cuda")
        with torch.cuda.stream(side):
            assert t.isnan().all().item()
            assert max(numbers.tolist()) < -(2**60)
    torch.cuda.synchronize()
    assert values(t) == [2]


def test_s2_simulated_another_stream_that_waits_reads_what_was_computed(device: SimulatedCuda) -> None:
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    with device.paused(torch.cuda.current_stream()):
        t = ones() + 1
        ready.record()
        with torch.cuda.stream(side):
            side.wait_event(ready)
            sum_ = t.sum()
        assert not side.query()
        assert not ready.query()
    side.synchronize()
    assert ready.query()
    assert sum_.item() == 16


def test_s2_simulated_the_target_of_a_copy_is_poisoned_until_it_is_done(device: SimulatedCuda) -> None:
    target, source, side = torch.zeros(8, device="cuda"), ones(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with device.paused(torch.cuda.current_stream()):
        target.copy_(source)
        with torch.cuda.stream(side):
            assert eventually(lambda: target.isnan().any().item())
    torch.cuda.synchronize()
    assert values(target) == [1]


def test_s2_simulated_work_takes_the_arguments_as_they_are_at_the_call(device: SimulatedCuda) -> None:
    number, pageable = torch.tensor(2.0), torch.ones(8)
    with device.paused():
        t = ones() * number
        t.add_(torch.empty_like(t).copy_(pageable, non_blocking=True))
        number.zero_()
        pageable.zero_()
    assert values(t) == [3]


def test_s2_simulated_delays_are_random(device: SimulatedCuda) -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device.delay = 0.01
    start.record()
    for _ in range(10):
        ones()
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 1.0  # milliseconds


def test_s2_simulated_what_needs_the_data_waits_for_its_stream(device: SimulatedCuda) -> None:
    t = torch.arange(4.0, device="cuda")
    for run, expected in (
        (lambda: t.sum().item(), 6),
        (lambda: t.nonzero().flatten().tolist(), [1, 2, 3]),
        (lambda: t[t > 1].tolist(), [2, 3]),
        (lambda: torch.equal(t, t + 0), True),
        (lambda: bool((t == t).all()), True),
        (lambda: repr(t), "tensor([0., 1., 2., 3.], device='cuda:0')"),
        (lambda: f"{t[3]:.1f}", "3.0"),
    ):
        before = device.synchronisations["implicit"]
        assert run() == expected
        assert device.synchronisations["implicit"] > before
    assert not device.fallbacks


def test_s2_simulated_a_held_stream_ends_a_wait_with_an_error(device: SimulatedCuda) -> None:
    device.patience = 0.05
    stream = torch.cuda.Stream()
    stream.hold()  # type: ignore[attr-defined]
    with torch.cuda.stream(stream):
        t = ones()
        with pytest.raises(RuntimeError, match="is a stream held"):
            t.sum().item()
    device.patience = 30.0
    stream.release()  # type: ignore[attr-defined]
    stream.synchronize()


# --- copies between host and device ------------------------------------------------------------------------------


def test_s2_simulated_a_copy_to_pinned_memory_is_not_there_yet(device: SimulatedCuda) -> None:
    t, host = ones(), torch.empty(8, pin_memory=True)
    assert host.is_pinned()
    assert host[2:].is_pinned()
    done = torch.cuda.Event()
    with device.paused():
        host.copy_(t, non_blocking=True)
        more = t.to("cpu", non_blocking=True)
        done.record()
        assert host.isnan().all()
        assert more.is_pinned()
        assert more.isnan().all()
    done.synchronize()
    assert values(host) == values(more) == [1]
    assert not device.synchronisations["implicit"]


def test_s2_simulated_a_copy_from_pinned_memory_reads_it_later(device: SimulatedCuda) -> None:
    host = torch.ones(8).pin_memory()
    with device.paused():
        t = host.to("cuda", non_blocking=True)
        host.fill_(7)  # the mistake
    assert values(t) == [7]


def test_s2_simulated_a_copy_to_pageable_memory_waits(device: SimulatedCuda) -> None:
    host = torch.zeros(8)
    host.copy_(ones() + 1, non_blocking=True)
    assert host.eq(2).all()
    assert (ones() + 2).cpu().eq(3).all()
    assert device.synchronisations["implicit"] == 2


def test_s2_simulated_pinning_fails_where_a_test_says_so(device: SimulatedCuda) -> None:
    device.pinning_fails = True
    for pin in (lambda: torch.empty(8, pin_memory=True), lambda: torch.ones(8).pin_memory()):
        with pytest.raises(RuntimeError, match="out of memory"):
            pin()  # type: ignore[no-untyped-call]
    device.pinning_fails = False
    assert torch.ones(8).pin_memory().is_pinned()
    assert not torch.ones(8).is_pinned()


# --- memory that is free -----------------------------------------------------------------------------------------


def test_s2_simulated_freed_memory_in_use_on_another_stream_is_poison(device: SimulatedCuda) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with device.paused(side):
        t = ones()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            read = t + 1
        del t
        main.synchronize()
    torch.cuda.synchronize()
    assert read.isnan().all().item()
    assert len(device.hazards) == 1
    assert device.hazards[0].startswith("add on stream 1 of cuda:0")


def test_s2_simulated_record_stream_keeps_freed_memory(device: SimulatedCuda) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with device.paused(side):
        t = ones()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            read = t[2:].view(2, 3) + 1
        t.record_stream(side)
        del t
        main.synchronize()
    torch.cuda.synchronize()
    assert values(read.flatten()) == [2]
    assert not device.hazards


def test_s2_simulated_a_write_to_freed_memory_is_named(device: SimulatedCuda) -> None:
    side = torch.cuda.Stream()
    t, host = ones(), torch.zeros(8).pin_memory()
    side.wait_stream(torch.cuda.current_stream())
    with device.paused(side):
        with torch.cuda.stream(side):
            t.copy_(host, non_blocking=True)
        del t
        torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert [hazard.split()[0] for hazard in device.hazards] == ["copy_"]


@pytest.mark.thorough
def test_s2_simulated_memory_lives_as_long_as_its_last_view(device: SimulatedCuda) -> None:
    t = ones(1024)
    held = torch.cuda.memory_allocated()
    view, p = t[10:12], nn.Parameter(t)
    t.data = torch.zeros(2, device="cuda")
    del t
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held + 8
    del p
    assert values(view) == [1]
    del view
    gc.collect()
    assert torch.cuda.memory_allocated() <= 16


# --- streams, events and devices ---------------------------------------------------------------------------------


def test_s2_simulated_each_thread_has_its_own_stream_and_device(device: SimulatedCuda) -> None:
    side, seen = torch.cuda.Stream(device=1), list[object]()
    torch.cuda.set_stream(side)

    def look() -> None:
        seen.extend((torch.cuda.current_device(), torch.cuda.current_stream(1), torch.ones(1, device="cuda").device))
        torch.cuda.set_device(1)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(10)
    assert seen == [0, torch.cuda.default_stream(1), torch.device("cuda:0")]
    assert torch.cuda.current_device() == 1
    assert torch.cuda.current_stream() == side == torch.cuda.current_stream("cuda:1")
    assert ones().device == side.device == torch.device("cuda:1")


def test_s2_simulated_contexts_restore_stream_and_device(device: SimulatedCuda) -> None:
    first, other = torch.cuda.Stream(), torch.cuda.Stream(device="cuda:1", priority=-1)
    with torch.cuda.stream(first), torch.cuda.stream(other), torch.cuda.StreamContext(None):
        assert torch.cuda.current_stream() == other
        with torch.cuda.device(0):
            assert torch.cuda.current_stream() == first
        assert torch.cuda.current_device() == other.device_index == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)
    assert torch.cuda.default_stream().cuda_stream == 0 != first.cuda_stream


def test_s2_simulated_streams_are_set_by_number(device: SimulatedCuda) -> None:
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        number, index, kind = torch._C._cuda_getCurrentStream(1)
    assert (number, index) == (side.stream_id, 1)
    torch._C._cuda_setStream(stream_id=number, device_index=index, device_type=kind)
    assert torch.cuda.current_stream() == side
    assert torch._C._cuda_getDevice() == 1
    torch._C._cuda_setDevice(0)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@pytest.mark.ranks(2)
async def test_s2_simulated_ranks_keep_their_streams(coll: aiodist.Communicator, simulated_cuda: SimulatedCuda) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            t = ones() * coll.rank
            assert await coll.allreduce(coll.rank) == 1
            assert torch.cuda.current_stream() == side
            assert values(t) == [coll.rank]
    assert simulated_cuda.count == 2


def test_s2_simulated_an_event_means_its_last_record(device: SimulatedCuda) -> None:
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    assert event.query()
    stream.wait_event(event)  # never recorded: nothing to wait for
    event.record()
    event.synchronize()
    with device.paused(stream):
        ones()
        event.record(stream)
        assert not event.query()
        event.record()
        event.synchronize()
        assert event.query()


def test_s2_simulated_events_are_shared_by_handle(device: SimulatedCuda) -> None:
    event = torch.cuda.Event(interprocess=True)
    same = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), event.ipc_handle())
    with device.paused():
        event.record()
        assert not same.query()
    same.synchronize()
    assert event.query()
    with pytest.raises(RuntimeError, match="handle"):
        torch.cuda.Event().ipc_handle()


def test_s2_simulated_devices_do_not_mix(device: SimulatedCuda) -> None:
    first, second, host = ones(), ones(device="cuda:1"), torch.ones(8)
    for other in (second, host):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            first + other
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.add(first, first, out=other)
    with pytest.raises(TypeError, match="to numpy"):
        first.numpy()
    assert values(first.add_(second.to(first.device))) == [2]


def test_s2_simulated_a_copy_between_devices_is_ordered_on_both(device: SimulatedCuda) -> None:
    with device.paused():
        source, target = ones() + 1, torch.zeros(8, device="cuda:1")
        target.copy_(source)
        source.zero_()
        target.add_(1)
    assert values(target) == [3]
    assert device.launches["copy_d2d"] == 1


def test_s2_simulated_errors_of_queued_work_stay(device: SimulatedCuda) -> None:
    t, event = ones(), torch.cuda.Event()
    device.fail(0, "an illegal memory access was encountered")
    event.record()
    for ask in (event.query, event.synchronize, torch.cuda.synchronize, torch.cuda.current_stream().query, t.tolist):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            ask()
    assert values(ones(device="cuda:1")) == [1]


def test_s2_simulated_a_kernel_that_fails_breaks_the_device(device: SimulatedCuda) -> None:
    table, indices = ones(), torch.tensor([3, 100], device="cuda")
    with device.paused():
        table[indices]
    with pytest.raises(torch.AcceleratorError, match="index 100 is out of bounds"):
        torch.cuda.synchronize()


def test_s2_simulated_capture_is_a_streams(device: SimulatedCuda) -> None:
    side = torch.cuda.Stream()
    with device.capturing(side):
        assert not torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()


# --- opening and closing -----------------------------------------------------------------------------------------


def _names() -> dict[str, object]:
    homes = (torch.cuda, torch, torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.autograd.graph)
    return {f"{home}.{name}": value for home in homes for name, value in vars(home).items()}


@pytest.mark.parametrize("error", [None, KeyError("a test's")])
def test_s2_simulated_torch_has_its_functions_back(error: Exception | None) -> None:
    before, threads = _names(), threading.active_count()
    with contextlib.ExitStack() as raising:
        if error is not None:
            raising.enter_context(pytest.raises(KeyError, match="a test's"))
        device = raising.enter_context(simulated_cuda(delay=0.0))
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        t = ones() + 1
        with device.paused():
            late = t * 3
            if error is not None:
                raise error
    after = _names()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert threading.active_count() == threads
    assert not torch.cuda.is_available()
    assert late.tolist() == [6] * 8


def test_s2_simulated_one_at_a_time(device: SimulatedCuda) -> None:
    with pytest.raises(RuntimeError, match="is open already"), simulated_cuda():
        pass
    assert values(ones()) == [1]


def test_s2_simulated_streams_end_with_the_device() -> None:
    with simulated_cuda(delay=0.0):
        stream = torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="is closed"):
        stream.synchronize()


def test_s2_simulated_the_fixture_opens_two_devices_and_reports_hazards(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("""
        import torch
        from tests.support.simulated_cuda.fixture import simulated_cuda

        def test_right(simulated_cuda):
            assert torch.cuda.device_count() == 2

        def test_wrong(simulated_cuda):
            side = torch.cuda.Stream()
            with simulated_cuda.paused(side):
                t = torch.ones(8, device="cuda")
                with torch.cuda.stream(side):
                    t + 1
                del t
                torch.cuda.current_stream().synchronize()
    """)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*add on stream 1 of cuda:0 used memory that had been freed*", "*simulated_cuda(*seed=*"]
    )

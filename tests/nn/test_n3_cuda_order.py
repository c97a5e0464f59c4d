"""N3 on CUDA devices: the device waits for reductions, the host does not, and a stream reads correct values."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import AiodistError, Communicator
from aiodist.communicator import parts_of
from aiodist.handles import Handle, Scheduler
from aiodist.nn import DataParallel
from aiodist.streams import Fence
from aiodist.testing.seams.progress import compute_of, reducer_of
from tests.nn.conftest import Trial
from tests.support.simulated_cuda.device import SimulatedCuda

if TYPE_CHECKING:
    from tests.conftest import NcclOnDevices

STEPS = 4


def batches(coll: Communicator, steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's, on its device."""
    drawn = [Trial.batch(coll.rank, step) for step in range(steps)]
    return [(x.to(coll.device), y.to(coll.device)) for x, y in drawn]


def loss_of(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(module(x), y)


def communication(net: DataParallel) -> list[torch.cuda.Stream]:
    """Return the streams on which the gradients of `net` are reduced: NCCL's."""
    accelerator: Any = parts_of(reducer_of(net).data).registry.resources.accelerator
    (group,) = accelerator.groups_of(reducer_of(net).data.name)
    return [group.stream]


@pytest.mark.drawn(2)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_cuda_a_step_synchronises_nothing(
    coll: Communicator, fake_nccl: NcclOnDevices, pipelined: bool
) -> None:
    net, opt = await Trial.made(coll, "adam", Trial.Mlp(coll.rank).to(coll.device), pipelined=pipelined, **Trial.FEW)
    data = batches(coll)
    await coll.barrier()  # every rank has its batches there
    before = dict(fake_nccl.device.synchronisations)
    for x, y in data:
        await net.step(partial(loss_of, net, x, y), opt)
    await coll.barrier()
    assert fake_nccl.device.synchronisations == before
    assert not fake_nccl.device.fallbacks
    if pipelined:
        await opt.flush()
    await coll.barrier()  # reading parameters synchronises: no rank reads before all have counted
    Trial.assert_same(net, Trial.alone(coll.size, STEPS, optimizer="adam"))
    await net.aclose()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("limit", [256 << 20, 1])
async def test_n3_cuda_a_step_returns_while_its_reductions_are_held(
    coll: Communicator, fake_nccl: NcclOnDevices, limit: int
) -> None:
    """The step returns for any limit on the loop's bytes in flight, while another lane requests twice the limit."""
    Scheduler.current().limit = limit
    others = Scheduler.current().lane("others").request(2 * limit, lambda: None)
    net, opt = await Trial.made(coll, "momentum", Trial.Mlp(coll.rank).to(coll.device), **Trial.FEW)
    data = batches(coll)
    for x, y in data[:3]:
        await net.step(partial(loss_of, net, x, y), opt)
    await net.submit(compute_of(net).finish)
    with fake_nccl.device.paused(*communication(net)):
        x, y = data[3]
        await net.step(partial(loss_of, net, x, y), opt)
        newest = reducer_of(net).last
        assert newest is not None
        assert not newest.over.done()
        after = [p.detach().clone() for p in net.parameters()]  # queued behind what is held
    await coll.barrier()  # all have let go
    for ours, theirs in zip(after, Trial.alone(coll.size, 4, optimizer="momentum").parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)
    await net.aclose()
    others.release()
    assert net.statistics().passes == 4


@pytest.mark.ranks(2)
async def test_n3_cuda_the_next_forward_is_queued_while_reductions_are_held(
    coll: Communicator, fake_nccl: NcclOnDevices
) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp(coll.rank).to(coll.device), **Trial.FEW)
    data = batches(coll)
    for x, y in data[:2]:
        await net.step(partial(loss_of, net, x, y), opt)
    await net.submit(compute_of(net).finish)
    queued = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begun(_: Tensor) -> None:
        loop.call_soon_threadsafe(queued.set)

    def forward(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(net, x, y)
        loss.register_hook(begun)
        return loss

    with fake_nccl.device.paused(*communication(net)):
        await net.step(partial(loss_of, net, *data[2]), opt)
        newest = reducer_of(net).last
        assert newest is not None
        held = newest.over
        last = asyncio.ensure_future(net.step(partial(forward, *data[3]), opt))
        async with asyncio.timeout(20):
            await queued.wait()
        assert not held.done()
    await last
    await coll.barrier()
    Trial.assert_same(net, Trial.alone(coll.size, 4))
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_a_reduction_waits_for_its_own_gradients_alone(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    """The last layer's gradients arrive while backward of the first one is held."""
    net = await DataParallel.create(Trial.Mlp().to(coll.device), coll, **Trial.SMALL)
    module: Any = net.module
    data = batches(coll)
    opt = Trial.OPTIMIZERS["sgd"](net.parameters())
    for x, y in data[:2]:
        await net.step(partial(loss_of, net, x, y), opt)
    await coll.barrier()
    alone = Trial.Mlp()
    alone.load_state_dict({name: t.cpu() for name, t in net.state_dict().items()})
    torch.stack([Trial.loss(alone, rank, 2) for rank in range(coll.size)]).mean().backward()
    net.zero_grad()
    blocked: Any = torch.cuda.Stream(coll.device)
    blocked.hold()

    def hold(gradient: Tensor) -> None:
        torch.cuda.current_stream(coll.device).wait_stream(blocked)

    hidden = module[1](module[0](data[2][0]))
    hidden.register_hook(hold)
    arrived: list[nn.Parameter] = []
    async with asyncio.timeout(30):
        async for parameter, gradient in net.backward_iter(mse_loss(rest(module, hidden), data[2][1])):
            assert gradient is parameter.grad
            arrived.append(parameter)
            if len(arrived) == 4:
                assert {id(p) for p in arrived} == {id(p) for p in (*module[2].parameters(), *module[4].parameters())}
                await coll.barrier()
                blocked.release()
    Trial.assert_same_gradients(module.cpu(), alone)
    await net.aclose()


def rest(module: Any, hidden: Tensor) -> Tensor:
    for layer in list(module)[2:]:
        hidden = layer(hidden)
    return hidden


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_cuda_each_step_on_a_stream_of_its_own(
    coll: Communicator, simulated_cuda: SimulatedCuda, pipelined: bool
) -> None:
    """The compute thread works in the order of the calls, on the device too."""
    net, opt = await Trial.made(
        coll, "momentum", Trial.Mlp(coll.rank).to(coll.device), pipelined=pipelined, **Trial.FEW
    )
    data = batches(coll)
    torch.cuda.synchronize(coll.device)
    for x, y in data:
        with torch.cuda.stream(torch.cuda.Stream(coll.device)):
            await net.step(partial(loss_of, net, x, y), opt)
    with torch.cuda.stream(torch.cuda.Stream(coll.device)):
        if pipelined:
            await opt.flush()
        seen = await net.submit(lambda: [p.detach().clone() for p in net.parameters()])
        expected = Trial.alone(coll.size, STEPS, optimizer="momentum")
        for ours, theirs in zip(seen, expected.parameters(), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.detach(), rtol=1e-6, atol=1e-9)
    await net.aclose()


@pytest.fixture
def backward_threads(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let every backward run in a thread of its own, on the streams of the caller, as autograd does for a device.

    The names of the threads are added to the set. It is a fixture because the ranks of a test share one `torch`:
    patched and restored by each of them in turn, it would stay patched.
    """
    original: Callable[..., None] = torch.Tensor.backward
    names: set[str] = set()

    def backward(t: Tensor, *args: Any, **kwargs: Any) -> None:
        streams = [torch.cuda.current_stream(i) for i in range(torch.cuda.device_count())]
        raised: list[BaseException] = []

        def run() -> None:
            names.add(threading.current_thread().name)
            for stream in streams:
                torch.cuda.set_stream(stream)
            try:
                original(t, *args, **kwargs)
            except BaseException as error:  # noqa: BLE001
                raised.append(error)

        thread = threading.Thread(target=run, name="pt_autograd_0")
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    return names


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_n3_cuda_hooks_run_in_a_thread_of_autograd(
    coll: Communicator,
    backward_threads: set[str],
    pipelined: bool,
) -> None:
    net, opt = await Trial.made(
        coll, "momentum", Trial.Mlp(coll.rank).to(coll.device), pipelined=pipelined, **Trial.SMALL
    )
    data = batches(coll)
    for x, y in data:
        await net.step(partial(loss_of, net, x, y), opt)
    if pipelined:
        await opt.flush()
    await coll.barrier()
    assert backward_threads == {"pt_autograd_0"}
    Trial.assert_same(net, Trial.alone(coll.size, STEPS, optimizer="momentum"))
    await net.aclose()


def by_hand(net: DataParallel, parts: list[Callable[[], None]]) -> None:
    """Make a pass with the gradients of all `parts`, each in a thread of its own, at the same time."""
    compute_of(net).drain()
    reduction = reducer_of(net).begin()
    start = threading.Barrier(len(parts))
    raised: list[BaseException] = []

    def run(part: Callable[[], None]) -> None:
        try:
            start.wait(20)
            part()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reducer_of(net).end_backward(reduction, raised[0] if raised else None)
    compute_of(net).use(reduction)


def bring(parameters: list[nn.Parameter], value: float, streams: list[Any] | None = None) -> None:
    """Bring gradients as autograd would: on a stream of its own, or of each parameter; then its hooks are called."""
    own = torch.cuda.Stream(parameters[0].device) if parameters[0].is_cuda else None
    for i, parameter in enumerate(parameters):
        with torch.cuda.stream(own if streams is None else streams[i]):
            parameter.grad = torch.zeros_like(parameter).add_(value).mul_(i + 1)
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2)
async def test_n3_cuda_several_threads_of_autograd_at_once(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    places = ["cuda:0", "cuda:1", "cpu"]
    module = nn.ModuleList(
        [nn.ParameterList([nn.Parameter(torch.zeros(3 + i)) for i in range(8)]).to(at) for at in places]
    )
    net = await DataParallel.create(module, coll, bucket_bytes=48, first_bucket_bytes=16)
    total = sum(range(1, coll.size + 1)) / coll.size
    lists: list[list[nn.Parameter]] = [list(part.parameters()) for part in module]
    for _ in range(6):
        net.zero_grad()
        await net.submit(by_hand, net, [partial(bring, part, float(coll.rank + 1)) for part in lists])
        for part in lists:
            for i, parameter in enumerate(part):
                assert parameter.grad is not None
                assert parameter.grad.cpu().eq(total * (i + 1)).all()
    assert reducer_of(net).learnt
    await net.aclose()


@pytest.mark.ranks(1)
async def test_n3_cuda_gradients_that_came_on_several_streams(
    coll: Communicator, simulated_cuda: SimulatedCuda
) -> None:
    """Only the last gradient of a bucket has a hook; the others came on another stream, which is late."""
    module = nn.ParameterList([nn.Parameter(torch.zeros(4, device="cuda")) for _ in range(3)])
    net = await DataParallel.create(module, coll)
    parameters = list(net.parameters())
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(5):
        net.zero_grad()
        simulated_cuda.delay = 1e-3
        with simulated_cuda.paused(slow):
            done = net.submit(by_hand, net, [partial(bring, parameters, 1.0 + step, [slow, slow, fast])])
            if step == 4:
                await done  # the host waits for none of them
        await done
        for i, parameter in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.cpu().eq((1.0 + step) * (i + 1)).all()
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_an_error_here_is_told_there(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp(coll.rank).to(coll.device), **Trial.SMALL)
    data = batches(coll, 3)

    module: Any = net.module
    fails: list[Any] = []

    def failing(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(net, x, y)

        def fail(_: Tensor) -> None:
            raise ValueError("in the middle of backward")

        fails.append(module[2].weight.register_hook(fail))
        return loss

    await net.step(partial(loss_of, net, *data[0]), opt)
    start = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError if coll.rank == 0 else AiodistError, match="in the middle of backward"):
        await net.step(partial(failing if coll.rank == 0 else partial(loss_of, net), *data[1]), opt)
    for name, t in net.state_dict().items():
        assert torch.equal(t.cpu(), start[name].cpu())
    for hook in fails:
        hook.remove()
    await net.step(partial(loss_of, net, *data[1]), opt)
    Trial.assert_same(net, Trial.alone(2, 2))
    await net.aclose()


@pytest.mark.ranks(2)
async def test_n3_cuda_what_fails_after_the_step_is_raised_by_the_next(
    coll: Communicator, fake_nccl: NcclOnDevices
) -> None:
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device))
    data = batches(coll)
    for x, y in data[:2]:
        await net.step(partial(loss_of, net, x, y), opt)
    await net.submit(compute_of(net).finish)
    called = False

    def forward() -> Tensor:
        nonlocal called
        called = True
        return loss_of(net, *data[3])

    with fake_nccl.device.paused(*communication(net)):
        await net.step(partial(loss_of, net, *data[2]), opt)
        await coll.barrier()  # no step is in flight
        reducer_of(net).data.abort("the cable was pulled")
        newest = reducer_of(net).last
        assert newest is not None
        await newest.over
    with pytest.raises(AiodistError, match="the cable was pulled"):
        await net.step(forward, opt)
    assert not called


@pytest.fixture
def late_loop(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Return two events: after the first is set, the loop releases no compute thread until the second is set."""
    reached, order, given_up, went_on = Fence.reached, Fence.order, threading.Event(), threading.Event()
    waited_for: set[int] = set()

    def noted(fence: Fence, *args: Any) -> None:
        waited_for.add(id(fence))
        order(fence, *args)
        waited_for.discard(id(fence))

    def late(fence: Fence, event: torch.cuda.Event | None) -> None:
        held = given_up.is_set() and event is None and id(fence) in waited_for
        reached(fence, event)
        assert not held or went_on.wait(10)

    monkeypatch.setattr(Fence, "order", noted)
    monkeypatch.setattr(Fence, "reached", late)
    return given_up, went_on


@pytest.mark.ranks(2)
async def test_n3_cuda_given_up_while_the_host_waits_for_its_part(
    coll: Communicator,
    simulated_cuda: SimulatedCuda,
    late_loop: tuple[threading.Event, threading.Event],
) -> None:
    """Tensors copied through the host: the compute thread waits until all are queued, and an abort ends the wait.

    The thread continues before the loop has notified the pass.
    """
    given_up, went_on = late_loop
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp().to(coll.device))
    data = batches(coll)
    for x, y in data[:2]:
        await net.step(partial(loss_of, net, x, y), opt)
    await coll.barrier()
    queued = asyncio.Event()
    loop = asyncio.get_running_loop()

    def begun(_: Tensor) -> None:
        loop.call_soon_threadsafe(queued.set)

    def forward() -> Tensor:
        loss = loss_of(net, *data[2])
        loss.register_hook(begun)
        return loss

    with simulated_cuda.paused(torch.cuda.default_stream(torch.device("cuda", 1))):
        step = asyncio.ensure_future(net.step(forward, opt))
        async with asyncio.timeout(20):
            await queued.wait()
            newest = reducer_of(net).last
            assert newest is not None
            await newest.usable
        await coll.barrier()
        assert not step.done()
        await coll.barrier()  # each has looked
        wait = compute_of(net).wait

        def waits(handle: Handle[Any]) -> Any:
            went_on.set()
            return wait(handle)

        compute_of(net).wait = waits  # type: ignore[method-assign]
        await coll.barrier()
        if coll.rank == 0:
            given_up.set()
            reducer_of(net).data.abort("enough")
        with pytest.raises(AiodistError, match="enough"):
            await step
    assert went_on.is_set()


@pytest.mark.ranks(1, 2)
async def test_n3_cuda_nothing_is_left_of_a_closed_net(coll: Communicator, simulated_cuda: SimulatedCuda) -> None:
    """No circle keeps its parameters and gradients until garbage is collected: they may be mapped by other ranks."""
    net, opt = await Trial.made(coll, "sgd", Trial.Mlp(coll.rank).to(coll.device), **Trial.SMALL)
    (x, y), *_ = batches(coll)
    await net.step(partial(loss_of, net, x, y), opt)
    await net.aclose()
    await coll.barrier()
    reducer = reducer_of(net)
    assert reducer.last is None

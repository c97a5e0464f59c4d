"""N14: `debug` finds what is not finite and which ranks differ, `dynamic=False` a graph that changes; traces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from aiodist import Communicator, Engine, MismatchError, RemoteError
from aiodist.engine import State
from aiodist.nn import DataParallel, PipelinedOptimizer, ShardedOptimizer
from tests.engine.conftest import Job

NAN, INF = float("nan"), float("inf")


async def made(coll: Communicator, *, module: nn.Module | None = None, **options: Any) -> Engine:
    net = await DataParallel.create(module or Job.build(), coll)
    return Engine(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), mse_loss, **Job.QUIET, **options)


@pytest.mark.drawn(1)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.ranks(2, backend=("mpi", "gloo"))
async def test_n14_debug_finds_nothing_where_nothing_is_wrong(coll: Communicator) -> None:
    engine = await made(coll, debug=True, dynamic=False)
    await engine.train(Job.pairs(coll.rank, 4), epochs=2)
    Job.assert_same(engine.state.net, Job.alone(coll.size, [4] * coll.size, epochs=2, optimizer="momentum"))


@pytest.mark.ranks(2)
async def test_n14_debug_with_a_pipelined_optimizer_and_uneven_data(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll, bucket_bytes=1, first_bucket_bytes=1)
    engine = Engine(
        net, await PipelinedOptimizer.create(net, Job.OPTIMIZERS["momentum"]), mse_loss, debug=True, **Job.QUIET
    )
    await engine.train(Job.pairs(coll.rank, 2), epochs=1)
    Job.assert_same(net, Job.alone(2, [2, 2], optimizer="momentum"))
    await engine.train(Job.pairs(coll.rank, 2 + coll.rank), epochs=2)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("bad", [NAN, INF])
async def test_n14_debug_names_a_loss_that_is_not_finite(coll: Communicator, bad: float) -> None:
    guilty = coll.size - 1
    pairs = Job.pairs(coll.rank, 3)
    if coll.rank == guilty:
        pairs[1][1][0, 0] = bad
    engine = await made(coll, debug=True)
    kind: type[Exception] = FloatingPointError if coll.rank == guilty else RemoteError
    with pytest.raises(kind, match=rf"the loss is {bad}: rank {guilty}, epoch 1, step 2"):
        await engine.train(pairs, epochs=2)


@pytest.mark.ranks(1)
async def test_n14_the_users_hooks_come_behind_ours(coll: Communicator) -> None:
    """The checks see their values."""
    engine = await made(coll, debug=True)
    seen: list[int] = []
    engine.on("criterion", lambda state: seen.append(state.step))
    engine.on("update", spoil)
    with pytest.raises(FloatingPointError, match="the loss is nan: rank 0, epoch 1, step 2"):
        await engine.train(Job.pairs(0, 2), epochs=1)
    assert seen == [1]


async def spoil(state: State) -> None:
    def fill() -> None:
        for p in state.net.parameters():
            p.data.fill_(NAN)

    assert isinstance(state.net, DataParallel)
    await state.net.submit(fill)


class Root(nn.Module):
    """The square root has an infinite slope at 0: a finite loss, and a gradient that is not."""

    def __init__(self, at: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.at = at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = 0.0 if self.calls == self.at else 1.0
        out: Tensor = self.first(x) + (self.second(x).square() * scale).sqrt()
        return out


@pytest.mark.ranks(1, 2)
async def test_n14_debug_names_a_gradient_that_is_not_finite(coll: Communicator) -> None:
    guilty = coll.size - 1
    engine = await made(coll, module=Root(at=4 if coll.rank == guilty else 0), debug=True)
    kind: type[Exception] = FloatingPointError if coll.rank == guilty else RemoteError
    with pytest.raises(kind, match=rf"the gradient of 'second\.\w+' has \d+ of \d+ .*: rank {guilty}, epoch 2, step 4"):
        await engine.train(Job.pairs(coll.rank, 3), epochs=2)
    assert not any(p._backward_hooks for p in engine.state.net.parameters())


@pytest.mark.ranks(1, 2)
async def test_n14_debug_names_a_parameter_that_is_not_finite(coll: Communicator) -> None:
    engine = await made(coll, debug=True)

    @engine.on("backward")
    def break_it(state: State) -> None:
        if state.step == 2:
            state.net.get_parameter("2.bias").grad[1] = INF

    text = r"parameter '2\.bias' after the update has 1 of 3 elements .* -inf: rank \d, epoch 1, step 2"
    with pytest.raises(FloatingPointError, match=text):
        await engine.train(Job.pairs(coll.rank, 3), epochs=1)


@pytest.mark.ranks(2, 3)
async def test_n14_debug_names_the_first_parameter_and_the_rank_that_differs(coll: Communicator) -> None:
    engine = await made(coll, debug=True)
    odd = coll.size - 1

    @engine.on("sample")
    def change(state: State) -> None:
        if coll.rank == odd and state.step == 2:
            with torch.no_grad():
                for name in ("2.weight", "2.bias"):
                    p = state.net.get_parameter(name)
                    p.copy_(torch.nextafter(p, torch.full_like(p, INF)))

    with pytest.raises(MismatchError, match=r"parameter '2\.weight' and on 1 more .*step 2 of epoch 1:") as e:
        await engine.train(Job.pairs(coll.rank, 3), epochs=1)
    assert f"rank {odd}: hash" in str(e.value)


@pytest.mark.ranks(2)
async def test_n14_debug_compares_the_parameters_of_a_sharded_optimizer(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, await ShardedOptimizer.create(net, Job.OPTIMIZERS["adam"]), mse_loss, debug=True, **Job.QUIET)

    @engine.on("backward")
    async def change(state: State) -> None:
        await state.optimizer.flush()  # what is gathered would take its place
        if coll.rank == 1 and state.step == 2:
            with torch.no_grad():
                net.get_parameter("2.bias")[1] += 1

    with pytest.raises(MismatchError, match=r"parameter '2\.bias' after step 2 of epoch 1: rank 0: .*; rank 1: "):
        await engine.train(Job.pairs(coll.rank, 3), epochs=1)


@pytest.mark.ranks(2)
async def test_n14_debug_leaves_scaled_gradients_alone(coll: Communicator) -> None:
    """With a scaler an infinite gradient is no mistake: it leaves the step out."""
    engine = await made(coll, module=Root(at=2), debug=True)
    engine.state.net.configure(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    await engine.train(Job.pairs(coll.rank, 3), epochs=1)


class Branches(nn.Module):
    """One branch in odd steps, both in even ones."""

    def __init__(self, *, changes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.always, self.now_and_then = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        self.calls = 0
        self.changes = changes

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.always(x)
        return out + self.now_and_then(x) if self.calls % 2 == 0 and self.changes else out


@pytest.mark.ranks(1, 2, 3)
async def test_n14_a_dynamic_graph_may_change(coll: Communicator) -> None:
    engine = await made(coll, module=Branches())
    await engine.train(Job.pairs(coll.rank, 4), epochs=1)
    module = Branches()
    opt = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        opt.zero_grad()
        module.calls = step
        losses = []
        for rank in range(coll.size):
            x, y = Job.pairs(rank, 4)[step]
            module.calls = step
            losses.append(mse_loss(module(x), y))
        torch.stack(losses).mean().backward()
        opt.step()
    Job.assert_same(engine.state.net, module)


@pytest.mark.ranks(1, 2)
async def test_n14_one_that_is_not_dynamic_must_not(coll: Communicator) -> None:
    guilty = coll.size - 1
    engine = await made(coll, module=Branches(changes=coll.rank == guilty), dynamic=False)
    kind: type[Exception] = RuntimeError if coll.rank == guilty else RemoteError
    text = (
        rf"the graph of step 2 differs .*: it now uses parameter 'now_and_then\.\w+' \(rank {guilty}, epoch 1, step 2\)"
    )
    with pytest.raises(kind, match=text):
        await engine.train(Job.pairs(coll.rank, 3), epochs=1)
    assert engine.state_dict()["step"] == 1


@pytest.mark.ranks(1)
async def test_n14_other_operations_on_the_same_parameters(coll: Communicator) -> None:
    net = await DataParallel.create(Job.build(), coll)
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=0.1), mse_loss, dynamic=False, **Job.QUIET)

    @engine.on("forward")
    def change(state: State) -> None:
        state.output = state.output.sin() if state.step == 3 else state.output.cos()

    with pytest.raises(RuntimeError, match=r"node 1, counted from the loss, is SinBackward0 instead of CosBackward0"):
        await engine.train(Job.pairs(0, 3), epochs=1)


@pytest.mark.ranks(1, 2)
async def test_n14_a_parameter_that_is_new(coll: Communicator) -> None:
    """No net would reduce its gradients."""
    engine = await made(coll)

    @engine.on("epoch")
    def replace(state: State) -> None:
        if coll.rank == coll.size - 1:
            state.network[2].weight = nn.Parameter(state.network[2].weight.detach() * 2)  # type: ignore[index]

    kind: type[Exception] = RuntimeError if coll.rank == coll.size - 1 else RemoteError
    with pytest.raises(kind, match=r"parameter '2\.weight' is not the one that the net was created with"):
        await engine.train(Job.pairs(coll.rank, 2), epochs=2)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("steps", "made_steps"), [((2, 3), 2), ((4, 9), 1)])
async def test_n14_a_trace_of_some_steps(
    coll: Communicator, tmp_path: Path, steps: tuple[int, int], made_steps: int
) -> None:
    engine = await made(coll, profile=steps, traces=tmp_path / "traces")
    await engine.train(Job.pairs(0, 4), epochs=1)
    file = tmp_path / "traces" / f"rank0-steps{steps[0]}-{steps[1]}.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::mse_loss" for event in events) == made_steps
    assert [*file.parent.iterdir()] == [file]


@pytest.mark.ranks(2, backend="gloo")
async def test_n14_a_trace_of_each_rank(coll: Communicator, tmp_path_factory: Any) -> None:
    folder = Path(await coll.broadcast_object(str(tmp_path_factory.mktemp("traces"))))
    engine = await made(coll, profile=(1, 1), traces=folder)
    await engine.train(Job.pairs(coll.rank, 2), epochs=1)
    await coll.barrier()
    assert {file.name for file in folder.iterdir()} == {"rank0-steps1-1.json", "rank1-steps1-1.json"}  # noqa: ASYNC240


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["state", "epochs"])
async def test_n14_ranks_in_different_epochs_are_told_when_one_begins(coll: Communicator, what: str) -> None:
    engine, steps = await made(coll), list[State]()
    engine.on("forward", steps.append)
    await engine.train(Job.pairs(coll.rank, 2), epochs=1)
    state = engine.state_dict()
    await engine.train(Job.pairs(coll.rank, 2), epochs=2)
    before = len(steps)
    if what == "state" and coll.rank == 1:
        engine.load_state_dict(state)
    with pytest.raises(MismatchError, match="disagree on the next epoch: rank 0: epoch 3 of 4; rank 1: epoch"):
        await engine.train(Job.pairs(coll.rank, 2), epochs=4 + (what == "epochs" and coll.rank))
    assert len(steps) == before

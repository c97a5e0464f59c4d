"""P4: optimizers on a server equal torch's own, whole or cut, for the sum and the mean of the workers' gradients."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from aiodist.ps import SGD, Adagrad, Adam, RMSprop, optimizer
from aiodist.ps.optimizers import OptimizerRule
from aiodist.ps.settings import place
from tests.support.one_thread import one_thread as one_thread

STEPS = 20
SHORT: dict[type[Optimizer], Callable[..., OptimizerRule]] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Adam,
    torch.optim.Adagrad: Adagrad,
    torch.optim.RMSprop: RMSprop,
}
SETTINGS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "dampening": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
}
CASES: dict[str, tuple[OptimizerRule, Callable[..., Any]]] = {
    case: (SHORT.get(kind, partial(optimizer, kind))(**settings), partial(kind, **settings))
    for case, (kind, settings) in SETTINGS.items()
}
"""The rule, and the constructor of torch's optimizer with torch's default implementation."""


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=drawn).to(dtype)


class Served:
    """A tensor on servers: cut as `place` says, each part with a state of its own."""

    def __init__(self, rule: OptimizerRule, t: Tensor, servers: int = 1) -> None:
        self.rule = rule
        self.tensor = t.clone()
        spans = place("w", t.numel(), t.element_size(), range(servers), 1)
        self.parts = [slice(span.start, span.stop) for span in spans]
        self.shards = [self.tensor[part] for part in self.parts]
        self.states = [rule.state(shard) for shard in self.shards]

    def push(self, gradient: Tensor, alpha: float = 1.0) -> None:
        for part, shard, state in zip(self.parts, self.shards, self.states, strict=True):
            self.rule.apply(shard, gradient[part], alpha, state)

    def configure(self, **changes: object) -> None:
        for state in self.states:
            self.rule.configure(state, **changes)


def torchs(make: Callable[[Any], Optimizer], start: Tensor) -> tuple[Tensor, Optimizer, Callable[[Tensor], None]]:
    """Return a parameter, its optimizer, and a function that makes a step."""
    parameter = torch.nn.Parameter(start.clone())
    own = make([parameter])

    def step(gradient: Tensor) -> None:
        parameter.grad = gradient
        own.step()

    return parameter.detach(), own, step


def feed(served: Served, step: Callable[[Tensor], None], steps: range) -> None:
    for i in steps:
        gradient = draw(served.tensor.numel(), 1 + i, served.tensor.dtype)
        served.push(gradient)
        step(gradient)


def close(found: Tensor, wanted: Tensor, within: float = 1e-6) -> None:
    torch.testing.assert_close(found, wanted, rtol=within, atol=within)


# --- against torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_p4_equals_torch_when_the_tensor_is_cut(case: str, servers: int, dtype: torch.dtype) -> None:
    rule, make = CASES[case]
    start = draw(103, 0, dtype)
    served = Served(rule, start, servers)
    whole, _, step = torchs(make, start)
    assert len(served.shards) == servers
    feed(served, step, range(STEPS))
    close(served.tensor, whole)
    assert not torch.equal(whole, start)


@pytest.mark.parametrize("case", ["sgd", "momentum", "nesterov", "adam", "adagrad", "rmsprop"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_p4_equals_torch_on_the_workers_gradients(case: str, reduction: str, workers: int) -> None:
    """As a server does it: pushes are weighted and added up one after another; torch has them in one tensor."""
    rule, make = CASES[case]
    start = draw(103, 0)
    weight = 1 / workers if reduction == "mean" else 1.0
    for servers in (1, 2, 3, 5):
        served = Served(rule, start, servers)
        whole, _, step = torchs(make, start)
        for i in range(STEPS):
            pushed = [draw(103, 100 * i + worker) for worker in range(workers)]
            combined = pushed[0] * weight
            for gradient in pushed[1:]:
                combined.add_(gradient, alpha=weight)
            served.push(combined)
            stacked = torch.stack(pushed)
            step(stacked.mean(0) if reduction == "mean" else stacked.sum(0))
        close(served.tensor, whole)


@pytest.mark.parametrize("case", ["momentum", "adam"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.complex128])
def test_p4_other_dtypes_as_torch_has_them(case: str, dtype: torch.dtype) -> None:
    rule, make = CASES[case]
    rule.check(dtype)
    start = draw(51, 0, dtype)
    served = Served(rule, start, 2)
    whole, _, step = torchs(make, start)
    feed(served, step, range(STEPS))
    within = 4 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(served.tensor, whole, rtol=within, atol=within, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("numel", [0, 1, 2])
def test_p4_fewer_elements_than_servers(case: str, numel: int) -> None:
    rule, make = CASES[case]
    start = draw(numel, 0)
    served = Served(rule, start, 3)
    whole, _, step = torchs(make, start)
    feed(served, step, range(3))
    close(served.tensor, whole)


@pytest.mark.parametrize("case", ["momentum", "adam"])
def test_p4_alpha_multiplies_the_gradient(case: str) -> None:
    rule, make = CASES[case]
    start = draw(20, 0)
    served = Served(rule, start, 2)
    whole, _, step = torchs(make, start)
    for i in range(STEPS):
        alpha = 0.25 + i
        rule.check(torch.float32, alpha)
        served.push(draw(20, 1 + i), alpha)
        step(draw(20, 1 + i) * alpha)
    close(served.tensor, whole)


class Signs(Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, params: Any, lr: float = 0.1, **more: float) -> None:
        super().__init__(params, {"lr": lr, "power": 1, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"] ** group["power"])


def test_p4_an_optimizer_of_the_users_own() -> None:
    rule = optimizer(Signs, lr=0.5)
    served = Served(rule, torch.zeros(5), 2)
    served.push(torch.tensor([1.0, -2.0, 3.0, 0.0, -1.0]))
    served.configure(power=2)
    served.push(torch.ones(5))
    close(served.tensor, torch.tensor([-0.5, 0.5, -0.5, 0.0, 0.5]) - 0.25)
    with pytest.raises(ValueError, match="momentum: expected lr, power"):
        served.configure(momentum=0.9)


# --- lr and weight decay, each tensor for itself --------------------------------------------------------------------


def test_p4_lr_and_weight_decay_for_each_group() -> None:
    starts = draw(30, 0), draw(7, 1)
    served = [Served(SGD(0.1, 0.9), starts[0], 3), Served(SGD(0.2, 0.9, weight_decay=0.1), starts[1], 3)]
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    groups = [{"params": parameters[0], "lr": 0.1}, {"params": parameters[1], "lr": 0.2, "weight_decay": 0.1}]
    own = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    for i in range(STEPS):
        if i == 10:
            served[0].configure(lr=0.01, weight_decay=0.2)
            own.param_groups[0].update(lr=0.01, weight_decay=0.2)
        for one, parameter in zip(served, parameters, strict=True):
            parameter.grad = draw(parameter.numel(), 1 + i)
            one.push(parameter.grad)
        own.step()
    for one, parameter in zip(served, parameters, strict=True):
        close(one.tensor, parameter.detach())


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("sgd", {"momentum": 0.9}),
        ("momentum", {"momentum": 0.0}),
        ("momentum", {"nesterov": True}),
        ("adam", {"betas": (0.5, 0.6), "eps": 1e-3}),
        ("adam", {"maximize": True}),
        ("amsgrad", {"amsgrad": False}),
        ("adagrad", {"lr_decay": 1}),
        ("rmsprop", {"alpha": 0.5}),
    ],
)
def test_p4_every_setting_can_be_changed_between_pushes(case: str, changes: dict[str, Any]) -> None:
    rule, make = CASES[case]
    start = draw(20, 0)
    served = Served(rule, start, 2)
    whole, own, step = torchs(make, start)
    feed(served, step, range(7))
    served.configure(**changes)
    own.param_groups[0].update(changes)
    feed(served, step, range(7, STEPS))
    close(served.tensor, whole)


@pytest.mark.parametrize(
    ("case", "changes", "error", "said"),
    [
        ("sgd", {"lr": 0.5, "rate": 1, "beta": 2}, ValueError, "rule SGD: beta, rate: expected dampening, lr, max"),
        ("sgd", {"weight_decay": 0.1, "lr": -1}, ValueError, "Invalid learning rate: -1"),
        ("sgd", {"nesterov": True}, ValueError, "Nesterov"),
        ("sgd", {"lr": "high"}, TypeError, "rule SGD: lr='high': expected a number"),
        ("sgd", {"lr": True}, TypeError, "rule SGD: lr=True: expected a number"),
        ("sgd", {"lr": None}, TypeError, "rule SGD: lr=None: expected a number"),
        ("sgd", {"lr": torch.tensor(0.1)}, TypeError, "rule SGD: lr=tensor"),
        ("sgd", {"nesterov": 1}, TypeError, "rule SGD: nesterov=1: expected a bool"),
        ("sgd", {"params": []}, ValueError, "rule SGD: params: expected"),
        ("sgd", {"fused": True}, ValueError, "rule SGD: fused: expected"),
        ("adam", {"betas": (0.9,)}, TypeError, r"rule Adam: betas=\(0.9,\): expected 2 numbers"),
        ("adam", {"betas": (0.9, 2.0)}, ValueError, "Invalid beta"),
        ("adam", {"amsgrad": True}, ValueError, "rule Adam: amsgrad=True: this needs state"),
        ("rmsprop", {"momentum": 0.9}, ValueError, "rule RMSprop: momentum=0.9: this needs state"),
        ("adagrad", {"initial_accumulator_value": 1.0}, ValueError, "rule Adagrad: initial_accumulator_value"),
    ],
)
def test_p4_a_setting_that_cannot_be_changes_nothing(
    case: str, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    rule, make = CASES[case]
    start = draw(20, 0)
    served = Served(rule, start)
    whole, _, step = torchs(make, start)
    for i in range(3):
        group = dict(served.states[0].optimizer.param_groups[0])
        with pytest.raises(error, match=said):
            served.configure(**changes)
        assert served.states[0].optimizer.param_groups[0] == group
        served.push(draw(20, 1 + i))
        step(draw(20, 1 + i))
    close(served.tensor, whole)


# --- making one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: optimizer(torch.nn.Linear), TypeError, "expected a class of torch.optim"),  # type: ignore[arg-type]
        (lambda: optimizer("SGD"), TypeError, "expected a class of torch.optim"),  # type: ignore[arg-type]
        (lambda: optimizer(torch.optim.LBFGS), TypeError, "LBFGS.*treats each element by itself"),
        (lambda: optimizer(torch.optim.Adafactor), TypeError, "Adafactor.*treats each element by itself"),
        (lambda: optimizer(torch.optim.Muon), TypeError, "Muon.*treats each element by itself"),
        (lambda: optimizer(torch.optim.SparseAdam), TypeError, "SparseAdam.*treats each element by itself"),
        (lambda: optimizer(torch.optim.SGD, lr=torch.tensor(0.1)), TypeError, "SGD: lr=tensor.*expected a number"),
        (lambda: optimizer(torch.optim.SGD, rate=0.1), TypeError, "rate"),
        (lambda: SGD("fast"), TypeError, "str"),  # type: ignore[arg-type]
        (lambda: SGD(-1), ValueError, "Invalid learning rate"),
        (lambda: SGD(0.1, nesterov=True), ValueError, "Nesterov"),
        (lambda: Adam(betas=0.9), TypeError, "float"),
        (lambda: SGD(0.1, differentiable=True), RuntimeError, "leaf"),
    ],
)
def test_p4_an_optimizer_that_no_server_can_run_is_refused_in_the_call(
    make: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make()


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("case", ["sgd", "adam"])
def test_p4_integers_have_no_gradients(case: str, dtype: torch.dtype) -> None:
    rule = CASES[case][0]
    with pytest.raises(TypeError, match=rf"rule {rule.name} on {str(dtype)[6:]}: expected .*float32"):
        rule.check(dtype)


def test_p4_the_description_is_the_same_on_all_ranks() -> None:
    assert repr(SGD(0.1)) == "torch.optim.sgd.SGD(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)"
    assert repr(Adam(eps=1e-6, betas=(0.8, 0.9))) == "torch.optim.adam.Adam(betas=(0.8, 0.9), eps=1e-06, lr=0.001)"
    assert repr(optimizer(torch.optim.Adam, lr=0.1, eps=1.0)) == repr(optimizer(torch.optim.Adam, eps=1.0, lr=0.1))
    assert repr(optimizer(Signs)).endswith("Signs()")
    rule = SGD(0.1)
    before = repr(rule)
    rule.configure(rule.state(torch.ones(2)), lr=0.5)
    assert repr(rule) == before
    assert (rule.takes_gradients, rule.combines, rule.scales, rule.takes_value) == (True, True, True, True)


@pytest.mark.parametrize("how", [{"foreach": True}, {"fused": True}, {"fused": False}])
def test_p4_how_torch_computes_can_be_said(how: dict[str, bool]) -> None:
    rule = optimizer(torch.optim.Adam, lr=0.01, **how)
    own = rule.state(torch.ones(3)).optimizer
    assert {key: own.param_groups[0][key] for key in how} == how
    assert own.param_groups[0]["foreach"] is how.get("foreach")


# --- memory, modes, threads -----------------------------------------------------------------------------------------


def look(seen: list[int], own: Optimizer, args: Any, kwargs: Any) -> None:
    seen.append(own.param_groups[0]["params"][0].grad.data_ptr())


def test_p4_the_shard_is_updated_where_it_lies_and_the_gradient_is_not_kept() -> None:
    for rule, _ in CASES.values():
        shard, gradient = torch.ones(10), torch.full((10,), 0.5)
        state = rule.state(shard)
        seen: list[int] = []
        state.optimizer.register_step_pre_hook(partial(look, seen))
        rule.apply(shard, gradient, 1.0, state)
        assert seen == [gradient.data_ptr()]
        assert state.parameter.grad is None
        assert state.parameter.data_ptr() == shard.data_ptr()
        assert not torch.equal(shard, torch.ones(10))
        assert torch.equal(gradient, torch.full((10,), 0.5))
        kept = [one for one in state.optimizer.state[state.parameter].values() if isinstance(one, Tensor)]
        assert gradient.data_ptr() not in [one.data_ptr() for one in kept]


def test_p4_a_gradient_of_another_dtype_changes_no_state() -> None:
    rule, shard = SGD(0.1), torch.ones(3)
    state = rule.state(shard)
    with pytest.raises(RuntimeError, match="dtype"):
        rule.apply(shard, torch.ones(3, dtype=torch.float64), 1.0, state)
    assert state.parameter.grad is None
    assert torch.equal(shard, torch.ones(3))


def test_p4_a_shard_of_other_memory_and_one_made_in_inference_mode() -> None:
    rule, shards = SGD(0.1), [torch.ones(3), torch.ones(3)]
    state = rule.state(shards[0])
    with pytest.raises(ValueError, match="rule SGD: expected the state of this shard"):
        rule.apply(shards[1], torch.ones(3), 1.0, state)
    assert all(torch.equal(shard, torch.ones(3)) for shard in shards)
    with torch.inference_mode(), pytest.raises(ValueError, match="rule SGD: the shard was made in inference mode"):
        rule.state(torch.ones(3))


@pytest.mark.parametrize("case", CASES)
def test_p4_any_mode_of_the_thread_will_do(case: str) -> None:
    """State and steps from inference mode also work outside of it, with or without gradients switched off."""
    rule, make = CASES[case]
    start = draw(20, 0)
    shard = start.clone()
    whole, _, step = torchs(make, start)
    modes = [torch.inference_mode, torch.no_grad, torch.enable_grad]
    with torch.inference_mode():
        state = rule.state(shard)
    for i in range(6):
        with modes[i % 3]():
            rule.apply(shard, torch.nn.Parameter(draw(20, 1 + i)) if i > 2 else draw(20, 1 + i), 1.0, state)
            if i == 3:
                rule.configure(state, lr=0.5)
                rule.load_state_dict(state, copy.deepcopy(rule.state_dict(state)))
        step(draw(20, 1 + i))
        if i < 3:
            close(shard, whole)
    assert not shard.requires_grad
    assert torch.is_grad_enabled()
    kept = [one for one in state.optimizer.state[state.parameter].values() if isinstance(one, Tensor)]
    assert not any(one.is_inference() or one.requires_grad for one in kept)


def test_p4_shards_are_updated_from_many_threads() -> None:
    rule, make = CASES["adam"]
    start = draw(1000, 0)
    served = [Served(rule, start) for _ in range(4)]
    whole, _, step = torchs(make, start)

    def work(one: Served) -> None:
        for i in range(STEPS):
            one.push(draw(1000, 1 + i))

    threads = [threading.Thread(target=work, args=(one,)) for one in served]
    for thread in threads:
        thread.start()
    for i in range(STEPS):
        step(draw(1000, 1 + i))
    for thread in threads:
        thread.join(30)
    for one in served:
        close(one.tensor, whole)


# --- to and from a checkpoint ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_p4_the_state_goes_to_a_file_and_back(case: str) -> None:
    rule, make = CASES[case]
    start = draw(20, 0)
    served, (whole, _, step) = Served(rule, start), torchs(make, start)
    feed(served, step, range(5))
    file = io.BytesIO()
    torch.save((served.tensor, rule.state_dict(served.states[0])), file)
    file.seek(0)
    tensor, kept = torch.load(file, weights_only=True)
    again = Served(rule, tensor)
    rule.load_state_dict(again.states[0], kept)
    feed(again, step, range(5, STEPS))
    close(again.tensor, whole)


@pytest.mark.parametrize("case", CASES)
def test_p4_what_is_cut_of_the_state_is_as_long_as_the_shard(case: str) -> None:
    """So a checkpoint can put shards together, and cut them for another number of servers."""
    rule, make = CASES[case]
    start = draw(20, 0)
    served, (whole, _, step) = Served(rule, start, 3), torchs(make, start)
    feed(served, step, range(5))
    states = [rule.state_dict(state) for state in served.states]
    joined = copy.deepcopy(states[0])
    for key, one in joined["state"].get(0, {}).items():
        parts = [state["state"][0][key] for state in states]
        if isinstance(one, Tensor) and one.dim():
            joined["state"][0][key] = torch.cat(parts)
        else:
            assert all(part == one for part in parts)
    again = Served(rule, served.tensor)
    rule.load_state_dict(again.states[0], joined)
    feed(again, step, range(5, STEPS))
    close(again.tensor, whole)


def test_p4_what_is_given_back_is_copied() -> None:
    rule = Adam(0.1)
    first, second = Served(rule, torch.ones(5)), Served(rule, torch.ones(5))
    first.push(torch.ones(5))
    rule.load_state_dict(second.states[0], rule.state_dict(first.states[0]))
    before = copy.deepcopy(rule.state_dict(first.states[0])["state"][0])
    second.push(torch.full((5,), 3.0))
    assert all(torch.equal(one, before[key]) for key, one in rule.state_dict(first.states[0])["state"][0].items())


def test_p4_the_state_of_a_longer_shard_and_what_is_no_state_are_refused() -> None:
    rule = Adam()
    longer, shorter = Served(rule, torch.ones(5)), Served(rule, torch.ones(4))
    longer.push(torch.ones(5))
    with pytest.raises(ValueError, match="rule Adam: exp_avg of 5 elements: the shard has 4"):
        rule.load_state_dict(shorter.states[0], rule.state_dict(longer.states[0]))
    with pytest.raises(ValueError, match="rule Adam: moments: expected state, param_groups"):
        rule.load_state_dict(shorter.states[0], {"moments": 1})
    shorter.push(torch.ones(4))

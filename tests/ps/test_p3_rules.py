"""P3: each rule against numpy, for every dtype that it takes; in place, leaving what was pushed as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aiodist.ps import Rule
from aiodist.ps.rules import RULES, Function, as_rule

Array = npt.NDArray[Any]

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
TAKES = {
    "zero": EVERY,
    "copy": EVERY,
    "add": INTEGERS + FLOATS + COMPLEX,
    "axpy": INTEGERS + FLOATS + COMPLEX,
    "mul": INTEGERS + FLOATS + COMPLEX,
    "min": [torch.bool, *INTEGERS, *FLOATS],
    "max": [torch.bool, *INTEGERS, *FLOATS],
}
NUMPY: dict[str, Callable[[Array, Array, Any], Array]] = {
    "zero": lambda shard, value, alpha: np.zeros_like(shard),
    "copy": lambda shard, value, alpha: value * alpha if alpha != 1 else value,
    "add": lambda shard, value, alpha: shard + alpha * value if alpha != 1 else shard + value,
    "axpy": lambda shard, value, alpha: shard + alpha * value if alpha != 1 else shard + value,
    "mul": lambda shard, value, alpha: shard * value,
    "min": lambda shard, value, alpha: np.minimum(shard, value),
    "max": lambda shard, value, alpha: np.maximum(shard, value),
}
PAIRS = [(rule, dtype) for rule, kinds in TAKES.items() for dtype in kinds]


def draw(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Return numbers of the whole range where that wraps around, so that overflow is compared too."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min // 2, limits.max, (numel,), generator=generator, dtype=dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def array(t: Tensor) -> Array:
    """Return a copy for numpy, which has no bfloat16: such values become float32."""
    return np.array((t.float() if t.dtype is torch.bfloat16 else t).numpy())


def expect(found: Tensor, wanted: Array, exactly: bool) -> None:
    made = torch.from_numpy(np.ascontiguousarray(wanted)).to(found.dtype)
    if exactly:
        torch.testing.assert_close(found, made, rtol=0, atol=0, equal_nan=True)
    else:
        eps = torch.finfo(found.dtype).eps  # of numbers of size 1 that may cancel
        torch.testing.assert_close(found, made, rtol=4 * eps, atol=8 * eps, equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
@pytest.mark.parametrize("numel", [0, 1, 1003])
def test_p3_equals_numpy(name: str, dtype: torch.dtype, numel: int) -> None:
    rule = RULES[name]
    rule.check(dtype)
    shard, value = draw(dtype, numel, 1), draw(dtype, numel, 2)
    with np.errstate(over="ignore"):
        wanted = NUMPY[name](array(shard), array(value), 1)
    pushed, where = value.clone(), shard.data_ptr()
    rule.apply(shard, value, 1.0, rule.state(shard))
    # Complex products are rounded in another order.
    expect(shard, wanted, exactly=not (dtype.is_complex and name == "mul"))
    assert torch.equal(value, pushed)
    assert shard.data_ptr() == where


@pytest.mark.parametrize("name", ["copy", "add", "axpy"])
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + COMPLEX)
@pytest.mark.parametrize("alpha", [3, 2.0, -1.0, 0.0])
def test_p3_alpha_multiplies_what_is_pushed(name: str, dtype: torch.dtype, alpha: float) -> None:
    rule = RULES[name]
    rule.check(dtype, alpha)
    shard, value = draw(dtype, 103, 1), draw(dtype, 103, 2)
    factor = np.array(alpha).astype(array(value).dtype)  # -1 is 255 in uint8
    with np.errstate(over="ignore"):
        wanted = NUMPY[name](array(shard), array(value), factor)
    rule.apply(shard, value, alpha, None)
    expect(shard, wanted, exactly=dtype in INTEGERS)


@pytest.mark.parametrize("name", ["copy", "add", "axpy"])
@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_p3_a_fraction_multiplies_floats(name: str, dtype: torch.dtype) -> None:
    shard, value = draw(dtype, 103, 1), draw(dtype, 103, 2)
    wanted = NUMPY[name](array(shard), array(value), array(value).dtype.type(0.3))
    RULES[name].check(dtype, 0.3)
    RULES[name].apply(shard, value, 0.3, None)
    expect(shard, wanted, exactly=False)


@pytest.mark.parametrize("name", RULES)
def test_p3_nan_and_infinity_as_numpy_has_them(name: str) -> None:
    nan, inf = float("nan"), float("inf")
    shard = torch.tensor([nan, 1.0, nan, inf, -inf, 0.0, inf])
    value = torch.tensor([1.0, nan, nan, -inf, 2.0, inf, inf])
    with np.errstate(invalid="ignore"):
        wanted = NUMPY[name](array(shard), array(value), 1)
    RULES[name].apply(shard, value, 1.0, None)
    expect(shard, wanted, exactly=True)


def test_p3_zero_clears_what_is_not_a_number() -> None:
    shard = torch.tensor([float("nan"), float("inf")])
    RULES["zero"].apply(shard, torch.ones(2), 1.0, None)
    assert shard.tolist() == [0.0, 0.0]


def test_p3_concurrent_adds_to_shards_of_their_own_sum_exactly() -> None:
    """One rule, many threads: it keeps nothing between calls."""
    shards = [torch.zeros(100, dtype=torch.int64) for _ in range(4)]
    rule = RULES["add"]

    def work(shard: Tensor) -> None:
        for i in range(500):
            rule.apply(shard, torch.full((100,), i), 1.0, None)

    threads = [threading.Thread(target=work, args=(shard,)) for shard in shards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(shard, torch.full((100,), sum(range(500)))) for shard in shards)


# --- what a rule takes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_p3_other_dtypes_are_refused_by_name(name: str) -> None:
    refused = [dtype for dtype in [*EVERY, torch.float8_e4m3fn, torch.qint8] if dtype not in TAKES[name]]
    for dtype in refused:
        with pytest.raises(TypeError, match=rf"rule {name} on {str(dtype)[6:]}: expected .*int64"):
            RULES[name].check(dtype)


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool])
@pytest.mark.parametrize("name", ["copy", "add", "axpy"])
def test_p3_integers_are_not_multiplied_by_fractions(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"rule {name} on {str(dtype)[6:]}"):
        RULES[name].check(dtype, 0.5)


@pytest.mark.parametrize(
    ("dtype", "alpha"),
    [
        (torch.int8, 128),
        (torch.uint8, -256.0),
        (torch.int64, 2.0**63),
        (torch.int64, float("inf")),
        (torch.float16, 1e5),
        (torch.float32, 10**400),
        (torch.float64, float("nan")),
        (torch.complex64, -1e300),
    ],
)
def test_p3_an_alpha_that_the_dtype_cannot_hold(dtype: torch.dtype, alpha: float) -> None:
    with pytest.raises(ValueError, match=r"rule add on \w+: alpha=.*expected a number from"):
        RULES["add"].check(dtype, alpha)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + COMPLEX)
def test_p3_the_largest_alpha_that_is_let_through_can_be_applied(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype) if dtype in INTEGERS else torch.finfo(dtype)
    for alpha in (limits.max, -limits.max):
        RULES["axpy"].check(dtype, alpha)
        RULES["axpy"].apply(torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype), alpha, None)


@pytest.mark.parametrize("name", ["mul", "min", "max"])
def test_p3_rules_that_multiply_nothing_take_no_alpha(name: str) -> None:
    with pytest.raises(ValueError, match=f"rule {name}: alpha=0.5: expected 1"):
        RULES[name].check(torch.float32, 0.5)


@pytest.mark.parametrize("alpha", ["2", None, 1j, 1 + 0j, False, torch.tensor(2.0)])
def test_p3_alpha_must_be_a_number(alpha: Any) -> None:
    with pytest.raises(TypeError, match=r"rule axpy: alpha=.*expected a number"):
        RULES["axpy"].check(torch.float32, alpha)


# --- threads, modes and memory --------------------------------------------------------------------------------------


class Made(TorchDispatchMode):
    """Counts tensors that are made: what no operator was given."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.data_ptr() for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.data_ptr() not in given:
            self.bytes += found.nbytes
        return found


def test_p3_the_counter_of_tensors_counts() -> None:
    with Made() as made:  # type: ignore[no-untyped-call]
        torch.ones(10) + torch.ones(10)
    assert made.bytes == 120


@pytest.mark.parametrize(
    ("name", "alpha"), [*((name, 1.0) for name in RULES), ("zero", 0.5), ("copy", 0.5), ("add", 0.5), ("axpy", 0.5)]
)
@pytest.mark.parametrize("gradients", [False, True])
def test_p3_nothing_of_the_size_of_a_shard_is_made(name: str, alpha: float, gradients: bool) -> None:
    rule = RULES[name]
    shard, value = torch.ones(1000), torch.ones(1000, requires_grad=gradients)
    with Made() as made:  # type: ignore[no-untyped-call]
        rule.apply(shard, value, alpha, None)
    assert made.bytes == 0


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("inference", [False, True])
def test_p3_no_history_and_no_mode_is_left(name: str, inference: bool) -> None:
    """A worker may push a parameter itself, to a shard that is one: in any mode of the thread."""
    rule = RULES[name]
    shard, value = torch.ones(4), torch.ones(4)
    both = torch.nn.Parameter(shard), torch.nn.Parameter(value)
    with torch.inference_mode(inference):
        rule.apply(shard, both[1], 1.0, rule.state(shard))
        rule.apply(both[0], value, 1.0, rule.state(shard))
    assert not shard.requires_grad
    assert shard.grad_fn is None
    assert not shard.is_inference()
    assert torch.equal(both[0], shard)
    assert torch.is_grad_enabled()
    shard.add_(1)


# --- by name, and of the user's own ---------------------------------------------------------------------------------


def test_p3_the_rules_by_name() -> None:
    assert list(RULES) == ["zero", "copy", "add", "axpy", "mul", "min", "max"]
    assert all(as_rule(name) is rule and rule.name == name == repr(rule) for name, rule in RULES.items())
    assert [name for name, rule in RULES.items() if not rule.takes_value] == ["zero"]
    assert [name for name, rule in RULES.items() if rule.combines] == ["copy", "add", "axpy"]
    assert not any(rule.takes_gradients for rule in RULES.values())


def test_p3_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="rule 'plus': expected one of zero, copy, add, axpy, mul, min, max"):
        as_rule("plus")


def clip_add(shard: Tensor, value: Tensor) -> None:
    shard.add_(value).clamp_(-1, 1)


class Scaled:
    """A function that is an object."""

    def __call__(self, shard: Tensor, value: Tensor) -> None:
        shard.add_(value)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_p3_a_function_of_the_users(dtype: torch.dtype) -> None:
    rule = as_rule(clip_add)
    rule.check(dtype, 2.0)
    shard, value = draw(dtype, 50, 1) // 4, torch.ones(50, dtype=dtype)
    wanted = np.clip(array(shard) + 2 * array(value), -1 if dtype is not torch.uint8 else 0, 1)
    rule.apply(shard, value, 2.0, rule.state(shard))
    expect(shard, wanted, exactly=True)
    assert torch.equal(value, torch.ones(50, dtype=dtype))


def test_p3_a_function_of_the_users_runs_without_autograd() -> None:
    shard, value, scale = (torch.nn.Parameter(torch.full((3,), x)) for x in (0.0, 1.0, 2.0))
    as_rule(lambda shard, value: shard.add_(value).mul_(scale)).apply(shard, value, 1.0, None)
    assert shard.tolist() == [2.0, 2.0, 2.0]
    plain = torch.ones(3)
    as_rule(lambda shard, value: shard.mul_(scale)).apply(plain, value, 1.0, None)
    assert shard.is_leaf
    assert not plain.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("fn", "called"),
    [
        (clip_add, "clip_add"),
        (partial(partial(clip_add)), "partial"),
        (Scaled(), "Scaled"),
        (Scaled().__call__, "Scaled.__call__"),
    ],
)
def test_p3_a_function_is_called_as_it_is_registered_or_as_it_calls_itself(fn: Any, called: str) -> None:
    assert as_rule(fn).name == called
    assert as_rule(fn, "mine").name == "mine"
    assert repr(as_rule(fn)) == f"Function({called})"  # no address: ranks compare it


def test_p3_a_function_that_makes_a_new_tensor_is_found_out() -> None:
    rule = as_rule(lambda shard, value: shard + value, "adder")
    with pytest.raises(TypeError, match="rule adder returned Tensor: expected None, and the shard changed"):
        rule.apply(torch.ones(2), torch.ones(2), 1.0, None)
    as_rule(lambda shard, value: shard.add_(value)).apply(torch.ones(2), torch.ones(2), 1.0, None)


def test_p3_what_a_function_raises_is_raised() -> None:
    def broken(shard: Tensor, value: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        as_rule(broken).apply(torch.ones(2), torch.ones(2), 1.0, None)
    assert torch.is_grad_enabled()


async def waits(shard: Tensor, value: Tensor) -> None:
    """A coroutine function, which is no rule: a server would never await it."""


@pytest.mark.parametrize("given", [3, None, torch.optim.SGD, Function, waits, torch.ones(2)])
def test_p3_what_is_no_rule(given: Any) -> None:
    with pytest.raises(TypeError, match="expected a name, a Rule"):
        as_rule(given)


class Counting(Rule):
    """A rule of the user's with state: how often each shard was pushed to."""

    def state(self, shard: Tensor) -> list[int]:
        return [0]

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: list[int]) -> None:
        state[0] += 1
        shard.fill_(state[0])


def test_p3_a_rule_of_the_users_has_state_for_each_shard() -> None:
    rule = as_rule(Counting())
    assert rule.name == repr(rule) == "Counting"
    shards = torch.zeros(3), torch.zeros(2)
    states = [rule.state(shard) for shard in shards]
    for _ in range(3):
        rule.apply(shards[0], shards[0], 1.0, states[0])
    rule.apply(shards[1], shards[1], 1.0, states[1])
    assert [shard[0].item() for shard in shards] == [3.0, 1.0]


@pytest.mark.parametrize("rule", [*RULES.values(), as_rule(clip_add)])
def test_p3_there_is_nothing_to_configure_and_nothing_to_keep(rule: Rule) -> None:
    state = rule.state(torch.ones(2))
    assert rule.state_dict(state) == {}
    rule.load_state_dict(state, {})
    rule.configure(state)
    with pytest.raises(ValueError, match=rf"rule {rule.name}: lr: the rule has no settings"):
        rule.configure(state, lr=0.1)
    with pytest.raises(ValueError, match=rf"rule {rule.name}: step: the rule has no state"):
        rule.load_state_dict(state, {"step": 1})

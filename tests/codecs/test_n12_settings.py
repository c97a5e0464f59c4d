"""N12, P10: ranks compare the type and the settings of a codec, and never its address."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiodist
from aiodist import Communicator, codecs
from aiodist.nn import Compression, DataParallel
from aiodist.ps import ParameterServer, Rule
from aiodist.types import settings_text


class Plain:
    """A codec of one's own, without a `__repr__`."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self._calls = [0]

    def encode(self, t: Tensor) -> Tensor:
        self._calls.append(len(self._calls))
        return t.reshape(-1).float().clone().view(torch.uint8)

    def decode(self, code: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        return code.view(torch.float32)[:numel].to(dtype)


class Slotted(Plain):
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        super().__init__()
        self.inner = inner


class OneSlot:
    __slots__ = "inner"

    def __init__(self) -> None:
        self.inner = Plain(2.0)


class Closed:
    """An object that allows no other attributes to be read."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


@dataclass(frozen=True)
class Wrapping:
    """A dataclass with something in it that has no `__repr__`."""

    inner: Any
    hidden: Any = field(default=None, repr=False)


class Scaled(Rule):
    """A rule of one's own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, shard: Tensor, value: Tensor, alpha: float, state: None) -> None:
        shard.add_(value, alpha=self.factor)


def function(x: object) -> object:
    return x


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: codecs.TopK(0.5), repr(codecs.TopK(0.5))),
        (lambda: Plain(2.0), "Plain(scale=2.0)"),
        (lambda: Slotted(Plain(2.0)), "Slotted(inner=Plain(scale=2.0), scale=1.0)"),
        (lambda: Wrapping([Plain(2.0), None], object()), "Wrapping(inner=[Plain(scale=2.0), None])"),
        (lambda: Wrapping({"a": Plain(2.0)}), "Wrapping(inner={'a': Plain(scale=2.0)})"),
        (lambda: Wrapping(function), f"Wrapping(inner={__name__}.function)"),
        (
            lambda: Wrapping(partial(function, Plain(2.0))),
            f"Wrapping(inner=partial([{__name__}.function, [Plain(scale=2.0)], {{}}]))",
        ),
        (
            lambda: Wrapping({Plain: 1, Slotted(3): 2}),
            f"Wrapping(inner={{<class '{__name__}.Plain'>: 1, Slotted(inner=3, scale=1.0): 2}})",
        ),
        (lambda: Wrapping(frozenset("cab")), "Wrapping(inner=frozenset('a', 'b', 'c'))"),
        (lambda: Wrapping(torch.device("cuda", 1)), "Wrapping(inner=cuda)"),
        (OneSlot, "OneSlot(inner=Plain(scale=2.0))"),
        (Closed, "Closed()"),
        (lambda: object(), "object()"),
        (lambda: None, "None"),
    ],
)
def test_n12_settings_are_text_without_addresses(made: Any, text: str) -> None:
    assert settings_text(made()) == settings_text(made()) == text


def test_n12_settings_show_each_element_of_a_tensor() -> None:
    first, second = (Wrapping(torch.zeros(3000)) for _ in range(2))
    assert settings_text(first) == settings_text(second)
    second.inner[1500] = 1e-9
    assert settings_text(first) != settings_text(second)


def test_n12_what_refers_to_itself_has_a_text() -> None:
    first, second = Wrapping([]), Wrapping([])
    for each in (first, second):
        each.inner.extend([each, Plain()])
    assert " at 0x" not in settings_text(first)
    assert settings_text(first) == settings_text(second)


@pytest.mark.ranks(2)
async def test_n12_a_codec_without_a_repr_trains(coll: Communicator) -> None:
    for made in (Plain, lambda: Compression(Plain(2.0))):
        async with await DataParallel.create(nn.Linear(4, 1), coll, compress=made()) as net:
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            await net.step(lambda net=net: net(torch.ones(4)).sum(), opt)


@pytest.mark.ranks(2)
async def test_n12_other_settings_of_a_codec_without_a_repr_are_told(coll: Communicator) -> None:
    with pytest.raises(aiodist.MismatchError, match=r"Plain\(scale=\d\.0\)"):
        await DataParallel.create(nn.Linear(4, 1), coll, compress=Plain(float(coll.rank)))


@pytest.mark.ranks(2)
async def test_p10_a_server_compares_codecs_and_rules_by_their_settings(coll: Communicator) -> None:
    for codec, rule in ((Plain(), "add"), (None, Scaled(2.0))):
        async with ParameterServer(coll, {"w": torch.zeros(4)}, codec=codec, rule=rule) as ps:
            await ps.push("w", torch.ones(4))
            await ps.barrier()
            assert (await ps.pull("w")).tolist() == [4.0 if codec is None else 2.0] * 4
            await ps.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["codec", "rule"])
async def test_p10_a_server_tells_of_other_settings(coll: Communicator, what: str) -> None:
    given: Any = {"codec": Plain(float(coll.rank))} if what == "codec" else {"rule": Scaled(float(coll.rank))}
    with pytest.raises(aiodist.MismatchError, match=r"(Plain\(scale|Scaled\(factor)=\d\.0\)"):
        async with ParameterServer(coll, {"w": torch.zeros(4)}, **given):
            pass

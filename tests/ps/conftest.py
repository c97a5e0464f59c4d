"""Fixtures: frames with changed entries, and for clients a server in memory that records its calls."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiodist.ps import EAMSGD, EASGD, AsySGInCon, Downpour
from tests.ps.frames import Frames

Make = Callable[..., Any]


class Call:
    """One request, whose end the server decides."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.late = False

    def done(self) -> bool:
        return bool(self.over.done())

    def __await__(self) -> Generator[Any, None, None]:
        if self.late:
            self.late = False  # told once
            raise TimeoutError("late")
        return (yield from asyncio.shield(self.over).__await__())


class Memory:
    """Tensors by name. With `held` calls stay in flight until `release`; the next to end raises `failing`."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {name: t.detach().clone() for name, t in tensors.items()}
        self.log: list[tuple[str, list[str], str | None]] = []
        self.lr = 0.5
        """Learning rate of its own rule, which takes gradients."""
        self.held = False
        self.waiting: list[tuple[str, Call, Callable[[], None]]] = []
        self.most_pushes = 0
        self.failing: Exception | None = None

    def push(self, what: Sequence[str], values: Sequence[Tensor], *, rule: str | None = None) -> Call:
        def apply() -> None:
            for name, value in zip(what, values, strict=True):
                assert value.is_contiguous()
                self.tensors[name] += value if rule == "add" else -self.lr * value

        return self._issue("push", what, rule, apply)

    def pull(self, what: Sequence[str], out: Sequence[Tensor], *, reads: str | None = None) -> Call:
        def read() -> None:
            for name, into in zip(what, out, strict=True):
                into.copy_(self.tensors[name])

        return self._issue("pull", what, reads, read)

    def _issue(self, kind: str, what: Sequence[str], how: str | None, effect: Callable[[], None]) -> Call:
        call = Call()
        self.log.append((kind, list(what), how))
        self.waiting.append((kind, call, effect))
        self.most_pushes = max(self.most_pushes, [kind for kind, _, _ in self.waiting].count("push"))
        if not self.held:
            self.release()
        return call

    def release(self) -> None:
        while self.waiting:
            _, call, effect = self.waiting.pop(0)
            if self.failing is not None:
                call.over.set_exception(self.failing)
                self.failing = None
            else:
                effect()
                call.over.set_result(None)

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.log]


class Trial:
    """A model of one weight vector, the server that knows it, and gradients of the test's choosing."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=dtype))
        self.ps = Memory(w=torch.tensor([0.25, 3.0, -1.0], dtype=dtype))
        self.params = {"w": self.w}

    @property
    def centre(self) -> Tensor:
        return self.ps.tensors["w"]

    def sgd(self, lr: float = 0.1) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.w], lr=lr)

    async def step(self, client: Any, gradient: float = 1.0) -> None:
        self.w.grad = torch.full_like(self.w, gradient)
        async with asyncio.timeout(50):
            await client.step()


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> Frames:
    """The frames of parameter servers between ranks of this process."""
    return Frames(monkeypatch)


@pytest.fixture
def trial() -> Trial:
    return Trial()


@pytest.fixture
def new_trial() -> type[Trial]:
    return Trial


@pytest.fixture
def memory() -> type[Memory]:
    return Memory


MAKERS: dict[str, Make] = {
    "easgd": lambda ps, params, opt: EASGD(ps, params, opt, tau=1, alpha=0.25),
    "prefetching": lambda ps, params, opt: EASGD(ps, params, opt, tau=2, alpha=0.25, prefetch=1),
    "eamsgd": lambda ps, params, opt: EAMSGD(ps, params, opt, tau=1, alpha=0.25),
    "downpour": lambda ps, params, opt: Downpour(ps, params, opt, n_push=1, n_pull=1),
    "asysg": lambda ps, params, opt: AsySGInCon(ps, params),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]

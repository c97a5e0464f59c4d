"""Every example under the launcher; what it prints is compared exactly."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiodist
from aiodist.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

Launch = Any  # conftest's fixture
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")

TEN = "[0. 0.34888889 0.69777778 1.04666667 1.39555556 1.74444444 2.09333333 2.44222222 2.79111111 3.14]"
MESSAGE = "{'a': 10, 'b': 1.234, 'c': 'foobar'}"


def numbers(first: int, last: int) -> str:
    return f"[{' '.join(f'{i}.' for i in range(first, last + 1))}]"


def test_c12_the_patterns_print_exactly_this(launch: Launch, mpi: str) -> None:
    done = launch(4, EXAMPLES / "patterns.py", mpi=mpi)
    assert (done.code, done.errors) == (0, "")
    first = {0: [f"Process 0: sending {MESSAGE}"], 1: [f"Process 1: received {MESSAGE}"]}
    root = [numbers(1, 40), "sum 6.0, max 3.0"]
    for rank in range(4):
        assert done.lines[rank] == [
            *first.get(rank, []),
            TEN,
            numbers(10 * rank + 1, 10 * rank + 10),
            *(root if rank == 0 else []),
            "sum 6.0, max 3.0",
            "min 1.0, max 4.0, sum 10.0",
        ]


def test_c13_small_examples_print_what_they_say_with_openmpi(launch: Launch) -> None:
    names = ["hello", "gather_many", "by_hand"]
    done = launch(2, ONE_AFTER_ANOTHER, *names, mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    for rank in range(2):
        assert done.lines[rank] == [line for name in names for line in [f"--- {name}", *promised(name, rank)]]
    for line in ("sum [3. 5. 7.]", "mean [1.5 2.5 3.5]", "allgather [0. 0. 0. 1. 1. 1.]", "broadcast 99"):
        assert line in done.lines[0]
        assert line in done.lines[1]


def promised(name: str, rank: int) -> list[str]:
    """Return what the docstring of an example says that a rank prints: the indented lines."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert docstring is not None
    lines = [line.strip() for line in docstring.splitlines() if line.startswith("    ")]
    of_rank = [line for line in lines if line.startswith(f"rank {rank} of ")]
    return of_rank or lines


@pytest.mark.parametrize("n", [2, 4])
def test_train_digits_with_openmpi(launch: Launch, n: int, tmp_path: Path) -> None:
    # The program itself compares the weights of all ranks at the end, and fails where they differ.
    done = launch(n, EXAMPLES / "train_digits.py", mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    check_accuracy(done.lines[0][-1], tmp_path / "digits.pt")
    assert [line for rank in range(1, n) for line in done.lines[rank]] == []


@pytest.mark.usefixtures("threads_restored")
def test_train_digits_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    aiodist.run(train_digits().main, tmp_path / "alone.pt")
    check_accuracy(capsys.readouterr().out.splitlines()[-1], tmp_path / "alone.pt")


def check_accuracy(last_line: str, checkpoint: Path) -> None:
    """Check the line, and that the checkpoint holds the weights that it speaks of."""
    match = re.fullmatch(r"test accuracy (\d\.\d{4})", last_line)
    assert match is not None, last_line
    assert float(match[1]) >= 0.95
    assert f"{accuracy_of(checkpoint):.4f}" == match[1]


@pytest.mark.usefixtures("threads_restored")
def test_train_digits_notices_different_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = train_digits()

    async def train(coll: aiodist.Communicator, net: torch.nn.Module, *_: object) -> None:
        with torch.no_grad():
            next(net.parameters()).add_(coll.rank)

    monkeypatch.setattr(program, "train", train)
    with pytest.raises(RuntimeError, match="the ranks ended with different weights"):
        run_ranks(2, lambda: program.main(tmp_path / "never.pt"))


@pytest.fixture
def threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def train_digits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLES / "train_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracy_of(checkpoint: Path) -> float:
    module = train_digits()
    net: Callable[..., torch.Tensor] = module.build()
    net.load_state_dict(torch.load(checkpoint, weights_only=True))  # type: ignore[attr-defined]
    images, labels = module.load()
    with torch.no_grad():
        right = net(images[-module.HELD_OUT :]).argmax(1) == labels[-module.HELD_OUT :]
    return int(right.sum()) / len(right)


def test_examples_are_short_and_runnable() -> None:
    for example in EXAMPLES.glob("*.py"):
        text = example.read_text()
        assert len(text.splitlines()) <= 120, example.name
        assert 'if __name__ == "__main__":' in text, example.name
        assert ast.get_docstring(ast.parse(text)), example.name

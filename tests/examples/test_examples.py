"""Every example under the launcher; what it prints is compared exactly."""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import aiodist
from aiodist.nn import DataParallel
from aiodist.testing import run_ranks

Launch = Any  # conftest's fixture
Example = Callable[[str], Any]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ONE_AFTER_ANOTHER = Path(__file__).with_name("one_after_another.py")

TEN = "[0. 0.34888889 0.69777778 1.04666667 1.39555556 1.74444444 2.09333333 2.44222222 2.79111111 3.14]"
MESSAGE = "{'a': 10, 'b': 1.234, 'c': 'foobar'}"


def numbers(first: int, last: int) -> str:
    return f"[{' '.join(f'{i}.' for i in range(first, last + 1))}]"


@pytest.mark.drawn(1)
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


@pytest.mark.thorough
def test_c13_small_examples_print_what_they_say_with_openmpi(launch: Launch) -> None:
    names = ["hello", "gather_many", "by_hand"]
    done = launch(2, ONE_AFTER_ANOTHER, *names, mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    for rank in range(2):
        assert done.lines[rank] == [line for name in names for line in [f"--- {name}", *promised(name, rank)]]
    for line in ("sum [3. 5. 7.]", "mean [1.5 2.5 3.5]", "allgather [0. 0. 0. 1. 1. 1.]", "broadcast 99"):
        assert line in done.lines[0]
        assert line in done.lines[1]


@pytest.mark.thorough
def test_h14_a_write_in_flight_is_shown(launch: Launch) -> None:
    done = launch(2, EXAMPLES / "write_in_flight.py")
    assert (done.code, done.errors, done.lines.get(1, [])) == (0, "", [])
    assert done.lines[0] == promised("write_in_flight", 0)


def promised(name: str, rank: int) -> list[str]:
    """Return what the docstring of an example says that a rank prints: the indented lines."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert docstring is not None
    lines = [line.strip() for line in docstring.splitlines() if line.startswith("    ")]
    of_rank = [line for line in lines if line.startswith(f"rank {rank} of ")]
    return of_rank or lines


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
def test_train_digits_with_openmpi(launch: Launch, n: int, tmp_path: Path) -> None:
    # The program itself compares the weights of all ranks at the end, and fails where they differ.
    done = launch(n, EXAMPLES / "train_digits.py", mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    check_accuracy(done.lines[0][-1], tmp_path / "digits.pt")
    assert [line for rank in range(1, n) for line in done.lines[rank]] == []


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
def test_train_digits_alone(example: Example, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    aiodist.run(example("train_digits").main, tmp_path / "alone.pt")
    check_accuracy(capsys.readouterr().out.splitlines()[-1], tmp_path / "alone.pt")


def check_accuracy(last_line: str, checkpoint: Path) -> None:
    """Check the line, and that the checkpoint holds the weights that it speaks of."""
    match = re.fullmatch(r"test accuracy (\d\.\d{4})", last_line)
    assert match is not None, last_line
    assert float(match[1]) >= 0.98
    assert f"{accuracy_of(checkpoint):.4f}" == match[1]


def accuracy_of(checkpoint: Path) -> float:
    module = load_example("train_digits")
    net = module.build()
    net.load_state_dict(torch.load(checkpoint, weights_only=True))
    images, labels = module.load()
    with torch.no_grad():
        right = net(images[-module.HELD_OUT :]).argmax(1) == labels[-module.HELD_OUT :]
    return int(right.sum()) / len(right)


@pytest.mark.thorough
def test_c15_weights_are_the_same_to_the_bit_on_1_2_4_and_8_ranks(launch: Launch) -> None:
    printed = set()
    for n in (1, 2, 4, 8):
        done = launch(n, EXAMPLES / "reproducible.py", mpi="none")
        assert (done.code, done.errors) == (0, "")
        (line,) = done.lines[0]
        printed.add(line)
    (line,) = printed
    assert float(line.split()[-1]) >= 0.95


@pytest.mark.usefixtures("threads_restored")
def test_train_digits_notices_different_weights(
    example: Example, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = example("train_digits")

    async def train(net: DataParallel, *_: object, show: bool) -> None:
        with torch.no_grad():
            next(net.parameters()).add_(1.0 if show else 2.0)

    monkeypatch.setattr(program, "train", train)
    with pytest.raises(aiodist.MismatchError, match=r"0\.weight"):
        run_ranks(2, lambda: program.main(tmp_path / "never.pt"))
    assert not (tmp_path / "never.pt").exists()


SAME_STEPS = [f"train_{way}" for way in ("allreduce", "async", "prefetch", "pipelined", "sharded", "evaluate")] + [
    "model_parallel"
]
WAYS = [*SAME_STEPS, "train_uneven"]


@pytest.fixture(scope="module")
def sections(launched: Launch) -> dict[str, list[str]]:
    """The lines that rank 0 of two printed in each example: one job for all."""
    done, _ = launched(2, ONE_AFTER_ANOTHER, *WAYS, mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    assert done.lines[1] == [f"--- {name}" for name in WAYS]
    return by_example(done.lines[0])


def by_example(lines: list[str]) -> dict[str, list[str]]:
    """Return what each of several examples printed."""
    printed: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("--- "):
            printed[line.removeprefix("--- ")] = found = []
        else:
            found.append(line)
    return printed


@pytest.fixture(scope="module")
def sequential() -> list[str]:
    """The lines that the program of one process prints, run as a user does."""
    script = EXAMPLES / "train_sequential.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


def same_weights(seen: list[str], expected: list[str]) -> None:
    """Compare the last two lines: the norm of the weights, within what float64 rounds, and the accuracy."""
    norms = [re.fullmatch(r"norm of the weights (\d+\.\d{9})", lines[-2]) for lines in (seen, expected)]
    first, second = (float(match[1]) for match in norms if match is not None)
    assert first == pytest.approx(second, rel=1e-7)
    assert seen[-1] == expected[-1]


@pytest.mark.thorough
def test_t3_one_process_learns_the_digits(sequential: list[str]) -> None:
    assert len(sequential) == 2
    assert accuracy_in(sequential[-1]) >= 0.96


def accuracy_in(line: str) -> float:
    match = re.fullmatch(r"test accuracy (\d\.\d{4})", line)
    assert match is not None, line
    return float(match[1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAME_STEPS)
def test_t3_two_ranks_end_where_one_process_does(
    name: str, sections: dict[str, list[str]], sequential: list[str]
) -> None:
    same_weights(sections[name], sequential)


@pytest.mark.parametrize("ranks", [1, 2])
def test_n3_lbfgs_prints_what_it_says(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLES / "lbfgs.py"
    spec = importlib.util.spec_from_file_location("lbfgs", source)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    run_ranks(ranks, program.main)
    (line,) = capsys.readouterr().out.splitlines()
    assert f"`{line}`" in source.read_text()


@pytest.mark.thorough
def test_n11_uneven_data_is_used_up(sections: dict[str, list[str]]) -> None:
    lines = sections["train_uneven"]
    assert lines[0] == "batches of each rank: [64, 128]"
    assert accuracy_in(lines[-1]) >= 0.9


@pytest.mark.thorough
def test_n15_prefetch_tells_what_it_hid(sections: dict[str, list[str]]) -> None:
    match = re.fullmatch(r"preparing took \d\.\d\d s, (\d+)% of it hidden", sections["train_prefetch"][0])
    assert match is not None
    assert 0 < int(match[1]) <= 100


@pytest.mark.thorough
def test_t3_the_tasks_beside_training(launched: Launch) -> None:
    done, folder = launched(2, EXAMPLES / "train_evaluate.py", mpi="openmpi")
    assert (done.code, done.errors, done.lines[1]) == (0, "", [])
    lines = done.lines[0]
    epochs = [re.fullmatch(r"epoch (\d+): (\d\.\d{4})", line) for line in lines[:-2]]
    assert [int(match[1]) for match in epochs if match] == [3, 6, 9, 12, 15]
    last = epochs[-1]
    assert last is not None
    assert float(last[2]) == accuracy_in(lines[-1])
    saved = torch.load(folder / "digits.pt", weights_only=True)
    norm = sum(float(t.norm()) for t in saved["weights"].values())
    assert (saved["epoch"], f"norm of the weights {norm:.9f}") == (15, lines[-2])
    assert [file.name for file in folder.iterdir()] == ["digits.pt"]


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_t3_any_number_of_ranks(
    name: str, n: int, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = shortened(example, monkeypatch, capsys, epochs=3)
    program = example(name)
    arguments = [Path("digits.pt")] if name == "train_evaluate" else []
    run_ranks(n, lambda: program.main(*arguments))
    seen = capsys.readouterr().out.splitlines()
    if name in SAME_STEPS:
        same_weights(seen, expected)
    else:
        assert seen[0] == f"batches of each rank: {[192] if n == 1 else [32, 64, 96]}"
        assert accuracy_in(seen[-1]) >= 0.9


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (4, 2), (3, 1)])
def test_n17_a_stopped_training_ends_as_if_it_had_not_been(
    before: int,
    after: int,
    example: Example,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    expected = shortened(example, monkeypatch, capsys, epochs=3)
    program = example("resume")
    run_ranks(before, lambda: program.main(tmp_path / "digits", 20))
    stopped = capsys.readouterr().out.splitlines()
    assert stopped != expected
    run_ranks(after, lambda: program.main(tmp_path / "digits"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{after} ranks continue after step 20, saved by {before}"
    same_weights(lines[1:], expected)
    assert sorted(p.name for p in (tmp_path / "digits").iterdir()) == ["checkpoint-00000002", "checkpoint-00000003"]


@pytest.mark.thorough
def test_t3_resume_goes_on_with_other_ranks(launch: Launch, sequential: list[str]) -> None:
    done = launch(2, EXAMPLES / "resume.py", "40", mpi="openmpi")
    assert (done.code, done.errors, done.lines[1]) == (0, "", [])
    done = launch(1, EXAMPLES / "resume.py", mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    assert done.lines[0][0] == "1 ranks continue after step 40, saved by 2"
    same_weights(done.lines[0], sequential)


@pytest.mark.thorough
def test_t3_ps_workers_beside_a_server(launch: Launch, sequential: list[str]) -> None:
    names = ["ps_sync", "ps_data_parallel", "ps_evaluator"]
    done = launch(2, ONE_AFTER_ANOTHER, *names, mpi="none", servers=1)
    assert (done.code, done.errors) == (0, "")
    printed = by_example(done.lines[0])
    same_weights(printed["ps_sync"], sequential)
    assert accuracy_in(printed["ps_data_parallel"][-1]) >= 0.92
    assert done.lines[1] == [f"--- {name}" for name in names]
    check_versions(by_example(done.lines[2])["ps_evaluator"], sequential, last=165)


@pytest.mark.drawn(2)
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_t3_ps_synchronous_steps_are_those_of_one_process(
    n: int, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = shortened(example, monkeypatch, capsys, epochs=2)
    run_ranks(n, example("ps_sync").main)
    same_weights(capsys.readouterr().out.splitlines(), expected)
    run_ranks(n, example("ps_evaluator").main)
    check_versions(capsys.readouterr().out.splitlines(), expected, last=22)


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", ["ps_downpour", "ps_easgd", "ps_data_parallel", "ps_data_model_parallel"])
def test_t3_ps_workers_that_wait_for_nobody_learn(
    name: str, n: int, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortened(example, monkeypatch, capsys, epochs=8)
    run_ranks(n, example(name).main)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert accuracy_in(lines[-1]) >= 0.85


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("n", [1, 3])
def test_n16_records_from_a_queue_are_used_once(
    n: int, example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("records")
    monkeypatch.setattr(program, "EPOCHS", 4)
    run_ranks(n, program.main)
    check_records(capsys.readouterr().out.splitlines(), n, epochs=4)


@pytest.mark.thorough
def test_n16_records_in_processes(launch: Launch) -> None:
    done = launch(2, EXAMPLES / "records.py", mpi="openmpi")
    assert (done.code, done.errors, done.lines[1]) == (0, "", [])
    check_records(done.lines[0], 2, epochs=8)


def check_records(lines: list[str], n: int, epochs: int) -> None:
    for epoch, line in enumerate(lines[:epochs]):
        match = re.fullmatch(rf"epoch {epoch + 1}: 1437 records, each used once; by rank \[([\d, ]+)\]", line)
        assert match is not None, line
        counts = [int(count) for count in match[1].split(", ")]
        assert (len(counts), sum(counts)) == (n, 1437)
    assert accuracy_in(lines[-1]) >= 0.8  # ranks draw their records as they come
    assert len(lines) == epochs + 2


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
def test_p15_the_rows_of_the_digits_are_the_same_for_any_ranks(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortened(example, monkeypatch, capsys, epochs=6)
    found = []
    for n in (1, 2, 3):
        run_ranks(n, example("ps_embedding").main)
        lines = capsys.readouterr().out.splitlines()
        found.append(next(line for line in lines if line.startswith("test accuracy")))
        assert sum(int(line.split()[-2]) for line in lines if line.endswith(" rows")) > 800
    assert accuracy_in(found[0]) >= 0.8
    assert found[1:] == found[:1] * 2


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
@pytest.mark.parametrize("n", [1, 3])
def test_n14_the_engine_learns_the_digits_in_40_lines(
    n: int, example: Example, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("engine_digits")
    run_ranks(n, program.main)
    *epochs, last = capsys.readouterr().out.splitlines()
    line = re.compile(r"epoch (\d+)/15: loss \d\.\d+, accuracy (\d\.?\d*), \d+\.\d s")
    found = [match for match in map(line.fullmatch, epochs) if match is not None]
    assert [int(match[1]) for match in found] == [*range(1, len(epochs) + 1)]
    assert float(found[-1][2]) >= 0.95
    assert last == f"stopped after epoch {len(epochs)} of 15"
    assert len(epochs) < 15
    assert len((EXAMPLES / "engine_digits.py").read_text().splitlines()) <= 40


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
def test_n12_a_few_codecs_learn_the_digits(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = example("compressed")
    monkeypatch.setattr(program, "CODECS", [None, program.codecs.TopK(0.01), program.codecs.PowerSGD(rank=4)])
    monkeypatch.setattr(program, "PASSES", 1)
    run_ranks(2, program.main)
    check_compressed(capsys.readouterr().out.splitlines(), 3, within=0.02)


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize("n", [2, 3])
def test_n12_with_few_bytes_the_digits_are_learnt_as_well(launch: Launch, n: int) -> None:
    done = launch(n, EXAMPLES / "compressed.py", mpi="openmpi", seconds=300)  # seven trainings; 60 s among other tests
    assert (done.code, done.errors, done.lines[1]) == (0, "", [])
    check_compressed(done.lines[0], 7, within=0.01)


def check_compressed(lines: list[str], codecs: int, within: float) -> None:
    """Compare the accuracy of each codec with that of the first line, which is of plain gradients."""
    found = [re.fullmatch(r".*: (\d+\.\d) times fewer bytes, test accuracy (\d\.\d{4})", line) for line in lines]
    (plain, expected), *others = [(float(match[1]), float(match[2])) for match in found if match is not None]
    assert len(others) == codecs - 1
    assert plain == 1.0
    assert expected >= 0.95 - within
    for fewer, accuracy in others:
        assert fewer > 1.9
        assert accuracy >= expected - within


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
def test_n18_a_few_averages_learn_the_digits(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shortened(example, monkeypatch, capsys, epochs=8)
    program = example("local_sgd")
    few = ("gradients in every step", "averages that overlap", "an elastic band (EASGD)")
    monkeypatch.setattr(program, "WAYS", {name: program.WAYS[name] for name in few})
    monkeypatch.setattr(program, "PASSES", 1)
    run_ranks(2, program.main)
    check_seldom(capsys.readouterr().out.splitlines(), 3, at_least=0.85)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 3])
def test_n18_with_few_averages_the_digits_are_learnt_as_well(launch: Launch, n: int) -> None:
    done = launch(n, EXAMPLES / "local_sgd.py", mpi="openmpi", seconds=200)  # seven trainings; slow among other tests
    assert (done.code, done.errors, done.lines[1]) == (0, "", [])
    check_seldom(done.lines[0], 7, at_least=0.95)


def check_seldom(lines: list[str], ways: int, at_least: float) -> None:
    """Check that every line shows the accuracy asked for, and all but the first at most a fifth of its bytes."""
    found = [re.fullmatch(r".*: (\d+\.\d) MB, test accuracy (\d\.\d{4})", line) for line in lines]
    (plain, _), *others = seen = [(float(match[1]), float(match[2])) for match in found if match is not None]
    assert len(seen) == ways
    assert all(accuracy >= at_least for _, accuracy in seen)
    assert all(sent < plain / 5 for sent, _ in others)


@pytest.mark.thorough
@pytest.mark.usefixtures("threads_restored")
def test_n13_models_on_two_ranks_each_in_groups(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = shortened(example, monkeypatch, capsys, epochs=3)
    run_ranks(4, example("model_parallel").main)
    same_weights(capsys.readouterr().out.splitlines(), expected)
    monkeypatch.setattr(sys.modules["train_sequential"], "EPOCHS", 8)
    run_ranks(8, example("ps_data_model_parallel").main)
    assert accuracy_in(capsys.readouterr().out.splitlines()[-1]) >= 0.85


@pytest.mark.thorough
def test_n13_model_parallel_in_processes(launch: Launch) -> None:
    names = ["model_parallel", "ps_data_model_parallel"]
    done = launch(4, ONE_AFTER_ANOTHER, *names, mpi="openmpi")
    assert (done.code, done.errors) == (0, "")
    assert [line for rank in range(1, 4) for line in done.lines[rank]] == [f"--- {name}" for name in names] * 3
    for lines in by_example(done.lines[0]).values():
        assert accuracy_in(lines[-1]) >= 0.9


def check_versions(lines: list[str], expected: list[str], last: int) -> None:
    """Check what the evaluator printed: rising versions, an epoch apart or more, the last one that of all steps."""
    found = [re.fullmatch(r"version (\d+): (test accuracy .*)", line) for line in lines]
    versions = [int(match[1]) for match in found if match is not None]
    assert len(versions) == len(lines)
    assert versions[0] >= 11
    assert all(later - earlier >= 11 or later == last for earlier, later in pairwise(versions))
    assert versions[-1] == last
    assert lines[-1] == f"version {last}: {expected[-1]}"


def shortened(example: Example, monkeypatch: pytest.MonkeyPatch, capsys: Any, epochs: int) -> list[str]:
    """Limit examples to fewer epochs; return the lines that one process prints."""
    alone = example("train_sequential")
    monkeypatch.setattr(alone, "EPOCHS", epochs)
    monkeypatch.setitem(sys.modules, "train_sequential", alone)
    alone.main()
    lines: list[str] = capsys.readouterr().out.splitlines()
    return lines


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Example:
    """Loads an example again, as a module; its files go to an empty folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    return load_example


def load_example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_examples_are_short_and_runnable() -> None:
    for example in EXAMPLES.glob("*.py"):
        text = example.read_text()
        assert len(text.splitlines()) <= 120, example.name
        assert 'if __name__ == "__main__":' in text, example.name
        assert ast.get_docstring(ast.parse(text)), example.name


@pytest.mark.thorough
@pytest.mark.parametrize("n", [1, 3])
def test_t5_the_ranks_share_the_jobs_that_rank_0_hands_out(launch: Launch, n: int) -> None:
    done = launch(n, EXAMPLES / "workers.py", mpi="none")
    assert (done.code, done.errors) == (0, "")
    assert done.lines[0] == ["9 of 9 jobs done; the best: {'C': 10, 'gamma': 0.0001} with accuracy 0.903"]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_w3_elastic_training_ends_as_if_nothing_had_happened(launch: Launch, seed: int) -> None:
    """Two of four ranks are killed, drawn by the seed as the step is, and one joins."""
    script = EXAMPLES / "elastic.py"
    done = launch(4, script, "--seed", str(seed), mpi="none", elastic="2:4", joiners=1)
    draws = random.Random(seed)
    (first, step), (second, later) = ((draws.randrange(size), draws.randrange(20, 90)) for size in (4, 3))
    left = [number for number in range(4) if number != first]
    dead = [first, left[second]]
    died = [line for line in done.errors.splitlines() if "signal" in line]  # a slow start of a joiner is reported too
    assert (done.code, died) == (0, [f"rank {number}: signal SIGKILL" for number in dead])
    for number in set(range(4)) - set(dead):
        told = [re.findall(r"step (\d+), .* of (\d): PeerLost", line) for line in done.lines[number][:2]]
        (((at, size),), ((then, fewer),)) = told
        assert (size, fewer) == ("4", "3")
        assert 0 <= int(at) - step <= 1
        assert 0 <= int(then) - (90 + later) <= 1
    calm = launch(2, script, "--undisturbed", mpi="none", elastic="1:2").lines[0][0]
    (line,) = [line for lines in done.lines.values() for line in lines if "accuracy" in line]
    assert line.startswith("3 ranks in generation 3: test accuracy 0.9")
    assert abs(float(line.split()[-1]) - float(calm.split()[-1])) <= 0.01


@pytest.mark.thorough
def test_w13_metrics(launch: Launch) -> None:
    done = launch(2, EXAMPLES / "metrics.py", mpi="none")
    assert (done.code, done.errors) == (0, "")
    steps = [
        re.fullmatch(r"step (\d+): loss 0\.\d{3}, [\d.]+ ms, \d+% of it waited", line) for line in done.lines[0][:-1]
    ]
    assert [step and step[1] for step in steps] == ["10", "20", "30", "40"]
    assert [done.lines[rank][-1] for rank in range(2)] == ["rank 0: 40 steps", "rank 1: 40 steps"]


def test_w12_a_breakpoint_without_a_terminal_shows_how_to_attach(launch: Launch) -> None:
    done = launch(2, EXAMPLES / "breakpoint.py", mpi="none")
    assert (done.code, done.errors) == (0, "")
    error, *steps = done.lines[0]
    assert "`aiodist run --debug 0 ...`" in error
    assert steps == ["step 0: inf", "step 1: 1.683", "step 2: 1.117"]
    assert done.lines[1] == []

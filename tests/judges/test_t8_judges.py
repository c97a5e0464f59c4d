"""Judges: programs of others come to the same over aiodist in the place of gloo or nccl as over gloo.

They run unchanged in an environment of their own, which AIODIST_TEST_JUDGES names (`make judges` builds it and sets
this variable). Accelerators are the CPU in these processes, and each writes its groups, losses and weights down:
`programs/start/sitecustomize.py`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from tests.support.environ import python_path

HERE = Path(__file__).parent
PLACE = os.environ.get("AIODIST_TEST_JUDGES")

pytestmark = [pytest.mark.thorough, pytest.mark.processes, pytest.mark.timeout(2700)]


class Judge(NamedTuple):
    """A program of others: its path in the judges' folder or here, its arguments, and the sizes of its worlds."""

    program: str
    arguments: str = ""
    sizes: tuple[int, ...] = (2, 3)
    name: str = "gloo"
    """Backend that the program asks for."""
    trains: bool = True
    """True if each rank computes losses."""


_GPT = (
    "data_config.path=data/input.txt data_config.block_size=16 data_config.truncate=0.0005 gpt_config.n_layer=2 "
    "gpt_config.n_head=2 gpt_config.n_embd=16 trainer_config.max_epochs=2 trainer_config.save_every=1 "
    "trainer_config.batch_size=16 trainer_config.data_loader_workers=0 trainer_config.use_amp=false "
    "trainer_config.snapshot_path={folder}/snapshot.pt hydra.run.dir={folder}"
)
_SCRIPTS = "lib/*/site-packages/accelerate/test_utils/scripts"
_EXAMPLES = "examples/distributed"

JUDGES: Mapping[str, Judge] = MappingProxyType(
    {
        # At 3 ranks over gloo, test_script fails in a test of its own, and test_distributed_data_loop asks for 2.
        "accelerate test_script": Judge(f"{_SCRIPTS}/test_script.py", sizes=(2,)),
        "accelerate test_ops": Judge(f"{_SCRIPTS}/test_ops.py", trains=False),
        "accelerate test_sync": Judge(f"{_SCRIPTS}/test_sync.py"),
        "accelerate test_distributed_data_loop": Judge(f"{_SCRIPTS}/test_distributed_data_loop.py", sizes=(2,)),
        "accelerate test_ddp_comm_hook": Judge(f"{_SCRIPTS}/test_ddp_comm_hook.py"),
        "Trainer of transformers": Judge("programs/with_trainer.py", "{folder}"),
        "ddp/example": Judge(f"{_EXAMPLES}/ddp/example.py"),
        "ddp-tutorial-series/multigpu_torchrun": Judge(
            f"{_EXAMPLES}/ddp-tutorial-series/multigpu_torchrun.py", "1 1", name="nccl"
        ),
        "ddp-tutorial-series/multinode": Judge(f"{_EXAMPLES}/ddp-tutorial-series/multinode.py", "1 1", name="nccl"),
        "minGPT-ddp": Judge(f"{_EXAMPLES}/minGPT-ddp/mingpt/main.py", _GPT),
        "FSDP2": Judge(f"{_EXAMPLES}/FSDP2/example.py"),
        "FSDP2 --dcp-api": Judge(f"{_EXAMPLES}/FSDP2/example.py", "--dcp-api --explicit-prefetching"),
        "tensor_parallel_example": Judge(f"{_EXAMPLES}/tensor_parallelism/tensor_parallel_example.py", sizes=(2,)),
        "sequence_parallel_example": Judge(f"{_EXAMPLES}/tensor_parallelism/sequence_parallel_example.py", sizes=(2,)),
        "imagenet --dummy": Judge(
            "examples/imagenet/main.py", "--dummy --dist-url env:// --epochs 1 -j 0 -b 4 --no-accel", name="nccl"
        ),
    }
)

LIGHTNING = (
    "tests_fabric/plugins/collectives/test_torch_collective.py::test_two_groups",
    "tests_fabric/plugins/collectives/test_torch_collective.py::test_default_process_group",
    "tests_fabric/utilities/test_distributed.py::test_collective_operations",
    "tests_fabric/utilities/test_spike.py::test_fabric_spike_detection_integration",
    "tests_fabric/strategies/test_ddp_integration.py::test_ddp_save_load",
    "tests_fabric/strategies/launchers/test_multiprocessing_integration.py::test_memory_sharing_disabled",
    "tests_fabric/plugins/precision/test_amp_integration.py::test_amp",
    "tests_pytorch/strategies/test_ddp_integration.py::test_ddp_cpu",
    "tests_pytorch/strategies/test_ddp_integration.py::test_ddp_spawn_add_get_queue",
    "tests_pytorch/trainer/logging_/test_distributed_logging.py::test_all_rank_logging_ddp_cpu",
    "tests_pytorch/trainer/properties/test_get_model.py::test_get_model_ddp_cpu",
    "tests_pytorch/trainer/test_trainer.py::test_fit_test_synchronization",
    "tests_pytorch/trainer/test_trainer.py::test_trainer_predict_ddp_spawn",
    "tests_pytorch/utilities/test_all_gather_grad.py::test_all_gather_ddp_spawn",
)
"""Lightning's tests with groups of several ranks on the CPU."""


class Outcome(NamedTuple):
    """An exit code, the end of the output, and the facts that each rank wrote down."""

    code: int
    output: str
    ranks: Mapping[str, Sequence[Mapping[str, Any]]]

    def kinds(self) -> set[str]:
        """Return the classes of all default groups with several ranks."""
        return {str(fact["group"]) for facts in self.ranks.values() for fact in facts if fact.get("size", 0) > 1}

    def numbers(self, rank: str) -> list[float]:
        """Return the losses and sums of weights of a rank, in order."""
        return [value for fact in self.ranks[rank] for name, value in fact.items() if name in ("loss", "weights")]


@pytest.fixture(scope="session")
def judges() -> Path:
    """Return the folder of the environment and of the programs of others."""
    if not PLACE:
        pytest.skip("AIODIST_TEST_JUDGES is not set: `make judges` builds the environment of the judges")
    return Path(PLACE).resolve()


def outcome(
    judges: Path, command: Sequence[object], folder: Path, cwd: Path, seconds: float, /, **variables: str
) -> Outcome:
    """Run a command of the judges' environment for at most `seconds`; kill its processes after that."""
    record = folder / "record"
    record.mkdir(parents=True)
    start = str(HERE / "programs" / "start")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("AIODIST_")}
    environ |= {"PYTHONPATH": os.pathsep.join((start, python_path())), "OMP_NUM_THREADS": "1"}
    environ |= {"JUDGES_RECORD": str(record), "ACCELERATE_USE_CPU": "true", "AIODIST_SELECTOR": "none", **variables}
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=cwd, env=environ, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ranks = {
        file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(record.iterdir())
    }
    return Outcome(code, (folder / "output").read_text()[-6000:], ranks)


def over(way: str, judges: Path, judge: Judge, size: int, folder: Path) -> Outcome:
    """Run a judge over gloo, by `aiodist run --as`, or by torchrun with AIODIST_AS."""
    program = next((HERE if judge.program.startswith("programs") else judges).glob(judge.program), None)
    if program is None:
        pytest.skip(f"{judges} lacks {judge.program}")
    cwd = folder / "cwd"  # links to the program's folder: the program reads and writes files here
    cwd.mkdir(parents=True)
    for path in program.parent.iterdir():
        (cwd / path.name).symlink_to(path)
    arguments = judge.arguments.format(folder=folder).split()
    python = judges / "bin" / "python"
    torchrun = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size)
    variables = {"JUDGES_CPU": str(size)}
    if "imagenet" in judge.program:
        variables["JUDGES_VISION"] = str(judges / "vision")
    if way == "gloo":
        command: Sequence[object] = torchrun
    elif way == "torchrun":
        command, variables["AIODIST_AS"] = torchrun, judge.name
    else:
        command = (judges / "bin" / "aiodist", "run", "-n", size, "--as", judge.name)
    return outcome(judges, (*command, program, *arguments), folder, cwd, 900, **variables)


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name, judge in JUDGES.items() for size in judge.sizes], ids=str
)
def test_t8_programs_come_to_what_gloo_comes_to(judges: Path, tmp_path: Path, name: str, size: int) -> None:
    judge = JUDGES[name]
    gloo = over("gloo", judges, judge, size, tmp_path / "gloo")
    assert gloo.code == 0, gloo.output
    assert gloo.kinds() == {"ProcessGroupGloo"}
    assert len(gloo.ranks) == size
    for way in ("run", "torchrun")[: 4 - size]:
        found = over(way, judges, judge, size, tmp_path / way)
        assert found.code == 0, f"{way}: {found.output}"
        assert found.kinds() == {"AiodistProcessGroup"}
        for rank in gloo.ranks:
            numbers = found.numbers(rank)
            assert bool(numbers) is judge.trains
            assert all(map(math.isfinite, numbers))
            assert numbers == pytest.approx(gloo.numbers(rank), rel=1e-4, abs=1e-6), way


def test_t8_lightning_passes_where_gloo_passes(judges: Path, tmp_path: Path) -> None:
    ends = {}
    if not (judges / "lightning").exists():
        pytest.skip(f"{judges} lacks Lightning's tests")
    for name, variables in (("ProcessGroupGloo", {}), ("AiodistProcessGroup", {"AIODIST_AS": "gloo"})):
        folder = tmp_path / name
        report = folder / "report.xml"
        options = ("-p", "no:cacheprovider", "-q", "--timeout", 500, "--color", "no", "--junitxml", report)
        command = (judges / "bin" / "python", "-m", "pytest", *options, *LIGHTNING)
        found = outcome(judges, command, folder, judges / "lightning" / "tests", 1300, **variables)
        assert found.code == 0, found.output
        assert found.kinds() == {name}
        ends[name] = {
            f"{case.get('classname')} {case.get('name')}": {child.tag for child in case} - {"system-out", "system-err"}
            for case in ElementTree.parse(report).iter("testcase")
        }
    assert ends["AiodistProcessGroup"] == ends["ProcessGroupGloo"]
    assert any(not end for end in ends["ProcessGroupGloo"].values())

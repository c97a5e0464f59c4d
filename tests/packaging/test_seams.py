"""Tests use the public interface, `aiodist.testing` with its ten seams, and modules of rules.

A module of rules maps values to values: it has no thread, loop, socket or process. The tests of its own package may
import it. So the code below the public calls can change, and the tests stay.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.packaging.test_public import MODULES

ROOT = Path(__file__).resolve().parents[2]
SEAMS = sorted(f"aiodist.testing.seams.{path.stem}" for path in (ROOT / "aiodist/testing/seams").glob("[a-z]*.py"))
PUBLIC = {
    *MODULES,
    *SEAMS,
    *(f"aiodist.{name}" for name in ("c10d", "c10d.lightning", "communicator", "compat.mpi", "errors", "types")),
}
MACHINERY = {"asyncio", "concurrent", "mmap", "multiprocessing", "queue", "select", "socket", "subprocess", "threading"}
"""Modules that no module of rules imports."""
RULES = {
    "_core": "",
    "alias": "hook startup",
    "backends": "arithmetic matching shm.peers",
    "bench": "plan records timing tuning_worker",
    "bridges": "cut",
    "checkpoints": "format parts values",
    "codecs": "gradients",
    "collectives": "choice.availability choice.selector choice.table cuda.staging hierarchical implementations "
    "endpoint scheduled",
    "communicator": "claims conversation facts fingerprint levels messages oplog",
    "control": "roster",
    "data": "nesting queue_machine shards",
    "doctor": "findings",
    "elastic": "generations",
    "launch": "tracebacks verdict",
    "nn": "blocks layout pass_machine pass_status",
    "ps": "machines optimizers row_store rows rules settings wire",
    "schedules": "",
    "topology": "",
    "watch": "graph merging",
}
"""The modules of rules of each package; an empty text is the package itself."""
TESTED_IN = {
    "alias": {"alias", "support"},
    "_core": {"core", "backends", "lifecycle"},
    "backends": {"backends", "gpu"},
    "collectives": {"collectives", "communicator", "gpu"},
    "control": {"control", "launch"},
    "doctor": {"launch"},
    "env": {"alias", "launch"},
    "elastic": {"elastic", "launch"},
    "frames": {"control", "launch"},
    "handshake": {"control", "launch"},
    "pauses": {"handles"},
    "schedules": {"bench", "collectives", "communicator", "lifecycle", "schedules"},
    "terminal": {"launch"},
    "threads": {"handles", "streams"},
    "topology": {"communicator", "control", "launch"},
    "world": {"lifecycle", "launch", "handles"},
}
"""The folders of the tests of a package, where that is not the one of its name."""
PARTS = {
    "carriers and devices, without a communicator": "backends.cuda_ipc backends.cuda_ipc.mapping backends.gloo "
    "backends.gloo.library backends.gloo.wire backends.mpi.requests backends.nccl backends.nccl.group "
    "backends.nccl.library backends.shm.memory backends.shm.messages backends.shm.neighbours collectives.cuda.fused "
    "collectives.cuda.device_messages collectives.cuda.ipc collectives.cuda.peers",
    "benchmarks, with plans of a few milliseconds": "bench.cli bench.collectives bench.peers bench.plots "
    "bench.session bench.tuning",
    "files, and how they are written": "checkpoints.folders collectives.choice.tablefile launch.scratch",
    "the launcher and the doctor, with processes of the test": "launch.commands launch.discover elastic.sessions env "
    "launch.hosts launch.output launch.processes launch.ranks launch.supervisor launch.start launch.worker terminal "
    "doctor.ask doctor.here doctor.hosts world.pinning",
    "the control channel, with sockets of the test": "control.link control.places frames handshake",
    "the interface that mypy compares": "elastic.rebinding",
    "the exchange between ranks, as other packages call it": "world.agree",
    "what watches": "watch.arrivals watch.clock watch.exposition watch.jobs watch.metrics watch.shown "
    "watch.trace handles.stacks",
    "parts of one class, which no call shows apart": "communicator.threaded handles.buffers "
    "handles.calls handles.deadline pauses nn.buckets ps.pool threads world.isolation",
    "the order of reductions": "schedules.direct schedules.parts",
    "the plugin of pytest itself": "testing.plugin testing.ranks testing.jobs",
}
"""Other modules that the tests of their own package import, by the reason."""
ACROSS = {
    "backends/test_c1_one_element.py": "streams.memory",
    "backends/test_c1_shm_messages.py": "world.opening",
    "backends/test_h7_faults.py": "collectives.scheduled",
    "bench/test_s2_bench_gpu.py": "backends.nccl launch.commands",
    "collectives/test_a1_scheduled.py": "backends.arithmetic communicator.fingerprint communicator.operation",
    "collectives/test_a4_hierarchical.py": "communicator.fingerprint communicator.operation",
    "collectives/test_s4_cuda_ipc.py": "backends.cuda_ipc.mappings backends.arithmetic",
    "collectives/test_s4_cuda_ipc_failures.py": "backends.nccl",
    "collectives/test_s4_fused.py": "backends.arithmetic",
    "collectives/test_s5_direct.py": "backends.arithmetic backends.local",
    "collectives/test_s5_staged.py": "backends.arithmetic",
    "communicator/test_c14_names.py": "backends.arithmetic backends.base",
    "communicator/test_h10_threads.py": "backends.arithmetic",
    "communicator/test_h14_writes.py": "communicator.base",
    "communicator/test_h6_receives.py": "c10d.work",
    "communicator/test_s3_nccl.py": "backends.nccl",
    "conftest.py": "backends.nccl testing.jobs",
    "core/test_c2_binding.py": "checkpoints.folders",
    "docs/test_docs.py": "bench.cli bench.plan",
    "handles/test_h7_errors.py": "handles.polling",
    "handles/test_h9_buffers.py": "communicator.claims",
    "hosts/conftest.py": "bench.plan bench.records",
    "lifecycle/programs/opening.py": "backends.shm.neighbours",
    "lifecycle/programs/stopped.py": "ps.requests",
    "support/exchanges.py": "nn.compression",
    "support/simulated_cuda/patches.py": "backends.nccl",
    "watch/test_w11_inspect.py": "machine",
    "watch/test_w4_deadlocks.py": "c10d.work communicator.facts compat.requests threads",
    "watch/test_w5_arrivals.py": "communicator.facts communicator.fingerprint communicator.oplog handles.origin",
    "watch/test_w7_trace.py": "handles.tracing",
}
"""Files that import internal modules of other packages: each entry is one to be rid of, and no new one comes."""


def rules() -> Iterator[str]:
    for package, names in RULES.items():
        yield from (f"{package}.{name}" for name in names.split()) if names else (package,)


def imports(path: Path) -> set[str]:
    """Return the modules of ours that a file imports."""
    return {name for name in _modules(path) if name.split(".")[0] == "aiodist"}


def _modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {_home(node.module, alias.name) for alias in node.names}
    return found


def _home(module: str, name: str) -> str:
    inner = ROOT / f"{module}.{name}".replace(".", "/")
    public = module in PUBLIC and hasattr(importlib.import_module(module), name)
    return module if public or not (inner.is_dir() or inner.with_suffix(".py").exists()) else f"{module}.{name}"


def internals(path: Path) -> set[str]:
    """Return the internal modules that a file of tests imports, without those of its own package that it may."""
    folder = path.relative_to(ROOT / "tests").parts[0]
    parts = {*rules(), *" ".join(PARTS.values()).split()}
    found = {name.removeprefix("aiodist.") for name in imports(path) - PUBLIC}
    return {name for name in found if not (name in parts and folder in _folders(name))}


def _folders(module: str) -> set[str]:
    package = module.split(".")[0]
    return TESTED_IN.get(package, {package})


def test_tests_import_what_is_public_seams_and_rules() -> None:
    """An entry of the list that is no longer needed fails it too."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(path.relative_to(ROOT / "tests")): sorted(names) for path in files if (names := internals(path))}
    assert found == {path: sorted(names.split()) for path, names in ACROSS.items()}
    imported = {name.removeprefix("aiodist.") for path in files for name in imports(path)}
    assert not set(" ".join(PARTS.values()).split()) - imported


def test_modules_of_rules_have_no_machinery() -> None:
    for name in rules():
        path = ROOT / "aiodist" / name.replace(".", "/")
        parts = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for part in parts:
            assert not MACHINERY & {node.split(".")[0] for node in _modules(part)}, part


def test_there_are_ten_seams_of_at_most_eight_names() -> None:
    assert len(SEAMS) <= 10
    for name in SEAMS:
        seam = importlib.import_module(name)
        assert 0 < len(seam.__all__) <= 8
        assert all(hasattr(seam, one) for one in seam.__all__)

"""What is used of nccl4py is there, what is missing is said, and errors keep NCCL's text (S3)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from aiodist.backends import nccl
from aiodist.backends.nccl import as_numbers, library, reducer, unconnectable, version_installed
from aiodist.errors import BackendError, BackendUnavailable
from aiodist.testing.seams.nccl import Library, missing, supports
from aiodist.testing.seams.transport import DTYPES
from aiodist.types import ReduceOp
from tests.support.fake_nccl.communicator import FakeCommunicator
from tests.support.fake_nccl.core import FakeNccl
from tests.support.fake_nccl.interface import FakeConfig, NCCLError, NcclInvalid

Install = Callable[[object], None]

EXPECTED_SIGNATURES: dict[str, tuple[object, ...]] = {
    "get_unique_id": (),
    "get_version": (),
    "get_error_string": (5,),
    "group": (),
}
"""The functions that `Library` calls, with the arguments that it gives."""
EXPECTED_METHODS: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "init": ((2, 0, "id", "config"), {}),
    "get_async_error": (("self",), {}),
    "get_last_error": (("self",), {}),
    "finalize": (("self",), {}),
    "destroy": (("self",), {}),
    "abort": (("self",), {}),
    "allreduce": (("self", "send", "recv", "op"), {"stream": 7}),
    "broadcast": (("self", "send", "recv", 0), {"stream": 7}),
    "reduce": (("self", "send", "recv", "op", 0), {"stream": 7}),
    "allgather": (("self", "send", "recv"), {"stream": 7}),
    "reduce_scatter": (("self", "send", "recv", "op"), {"stream": 7}),
    "send": (("self", "send", 1), {"stream": 7}),
    "recv": (("self", "recv", 1), {"stream": 7}),
}


@pytest.fixture(params=["fake", "nccl4py"])
def core(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The fake has the interface that nccl4py has."""
    if request.param == "fake":
        fake = FakeNccl()
        return SimpleNamespace(module=fake, communicator=_fake_communicator())
    module = pytest.importorskip("nccl.core")
    return SimpleNamespace(module=module, communicator=module.Communicator)


def _fake_communicator() -> SimpleNamespace:
    return SimpleNamespace(init=FakeNccl().Communicator.init, **dict(vars(FakeCommunicator)))


@pytest.mark.parametrize("name", EXPECTED_SIGNATURES)
def test_s3_every_function_that_is_called_takes_these_arguments(core: SimpleNamespace, name: str) -> None:
    inspect.signature(getattr(core.module, name)).bind(*EXPECTED_SIGNATURES[name])


@pytest.mark.parametrize("name", EXPECTED_METHODS)
def test_s3_every_method_that_is_called_takes_these_arguments(core: SimpleNamespace, name: str) -> None:
    args, kwargs = EXPECTED_METHODS[name]
    inspect.signature(getattr(core.communicator, name)).bind(*args, **kwargs)


def test_s3_the_names_that_are_used_are_there(core: SimpleNamespace) -> None:
    module = core.module
    inspect.signature(module.NCCLConfig).bind(blocking=False)
    inspect.signature(module.UniqueId.from_bytes).bind(b"")
    assert [int(op) for op in (module.SUM, module.PROD, module.MAX, module.MIN)] == [0, 1, 2, 3]
    assert hasattr(core.communicator, "is_valid") or core.module.__class__ is FakeNccl


def test_s3_an_allreduce_calls_the_bindings_with_places_and_codes() -> None:
    """As nccl.h numbers dtypes and operators."""
    made: list[tuple[object, ...]] = []
    names = ("INT8", "UINT8", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT32", "FLOAT64", "BFLOAT16")
    ops = {"SUM": 0, "PROD": 1, "MAX": 2, "MIN": 3}
    core = SimpleNamespace(**{name: code for code, name in enumerate(names)}, **ops)
    ours = Library(
        core, SimpleNamespace(all_reduce=lambda *args: made.append(args), Comm=lambda place: ("comm", place))
    )
    group = SimpleNamespace(library=ours)
    comm, t = SimpleNamespace(ptr=7), torch.ones(3, 2)
    for kind, op in ((torch.bool, ReduceOp.BOR), (torch.complex64, ReduceOp.SUM), (torch.int64, ReduceOp.MIN)):
        numbers = as_numbers(t.to(kind))
        reducer(group, kind, op)(comm, numbers, 99)  # type: ignore[arg-type]
        place = numbers.data_ptr()
        code, number = {torch.bool: (1, 2), torch.complex64: (7, 0), torch.int64: (4, 3)}[kind]
        assert made.pop() == (place, place, 12 if kind.is_complex else 6, code, number, ("comm", 7), 99)


def test_s3_nccl4py_itself_does_what_the_code_relies_on() -> None:
    module = pytest.importorskip("nccl.core")
    bindings = pytest.importorskip("nccl.bindings.nccl")
    assert int(bindings.Comm(7).handle) == 7
    assert [int(code) for code in (module.UINT8, module.INT64, module.FLOAT32, module.BFLOAT16)] == [1, 4, 7, 9]
    assert bindings.check_status(library.IN_PROGRESS) is None  # a call in progress is no error
    with pytest.raises(bindings.NCCLError) as raised:
        bindings.check_status(5)
    assert raised.value.status == 5
    assert int(bindings.Result.Success) == library.SUCCESS
    assert int(bindings.Result.InProgress) == library.IN_PROGRESS
    unique_id = bytes(range(library.ID_BYTES))
    assert bytes(module.UniqueId.from_bytes(unique_id)) == unique_id
    assert not module.Communicator().is_valid
    config = module.NCCLConfig(blocking=False)
    assert config._to_lowpp().blocking == 0


# --- what is missing ---------------------------------------------------------------------------------------


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the versions of NCCL that are installed as wheels, by their names; there are none."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str]) -> Install:
    """Pretend that there is a device, and return what puts a module in the place of nccl4py."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def install(core: object) -> None:
        package = ModuleType("nccl")
        package.__spec__ = ModuleSpec("nccl", None)
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", SimpleNamespace())

    return install


def test_s3_without_a_device_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "nccl", None)
    assert "torch sees none" in (missing() or "")
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        nccl.load()


def test_s3_whether_it_is_missing_is_known_without_the_device_or_nccl4py(
    monkeypatch: pytest.MonkeyPatch, installed: Install, wheels: dict[str, str]
) -> None:
    def opened() -> bool:
        raise AssertionError("cuInit")

    monkeypatch.setattr(torch.cuda, "is_available", opened)
    installed(None)  # importing it raises
    assert missing() is None
    assert version_installed() == ()
    wheels["nvidia-nccl-cu12"] = "2.26.2.post1"
    assert version_installed() == (2, 26, 2)
    wheels["nvidia-nccl-cu13"] = "2.32.3"
    for built_for, found in (("12.8", (2, 26, 2)), ("13.0", (2, 32, 3)), (None, (2, 26, 2))):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        assert version_installed() == found
    wheels["nvidia-nccl-cu12"] = "2.22.3"
    assert "NCCL is 2.22.3, 2.23 or later is needed" in (missing() or "")


def test_s3_without_nccl4py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, installed: Install) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for built_for, extra in (("12.8", "cuda12"), ("13.0", "cuda13"), (None, "cuda12")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        assert missing() == f"nccl4py is not installed: pip install 'aiodist[{extra}]'"


def test_s3_a_library_that_is_missing_broken_or_old_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: Install
) -> None:
    fake = FakeNccl()
    installed(fake)
    assert missing() is None
    assert nccl.version() == "2.32.3"
    fake.release = (2, 22, 9)
    with pytest.raises(BackendUnavailable, match=r"NCCL is 2\.22\.9, 2\.23 or later is needed"):
        nccl.load()
    monkeypatch.setattr(fake, "get_version", lambda: SimpleNamespace(libnccl=None))
    with pytest.raises(BackendUnavailable, match=r"found no libnccl\.so\.2"):
        nccl.load()
    monkeypatch.setitem(sys.modules, "nccl.core", None)  # importing it raises
    with pytest.raises(BackendUnavailable, match="cannot be imported"):
        nccl.load()


def test_s3_ranks_that_share_a_device_are_refused_by_some() -> None:
    apart = [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")]
    together = [("a", "GPU-1"), ("b", "GPU-1"), ("b", "GPU-1")]
    for version in ((2, 23, 0), (2, 32, 3)):
        assert unconnectable(apart, version, shared=False) is None
    assert "ranks 1 and 2 share device GPU-1 of b" in (unconnectable(together, (2, 29, 7), shared=True) or "")
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in (unconnectable(together, (2, 30, 1), shared=False) or "")
    assert unconnectable(together, (2, 30, 1), shared=True) is None


# --- errors ------------------------------------------------------------------------------------------------


def test_s3_errors_keep_the_code_and_the_text() -> None:
    ours = Library(FakeNccl())
    theirs = NCCLError(2)
    error = ours.error(theirs, "allreduce")
    assert isinstance(error, BackendError)
    assert (error.code, error.__cause__) == (2, theirs)
    assert str(error) == "NCCL: allreduce: unhandled system error (2)"
    assert ours.error(NcclInvalid("Dtype mismatch"), "reduce").code is None
    comm = SimpleNamespace(is_valid=True, get_last_error=lambda: "socket closed by peer\n")
    assert str(ours.failure(comm, 6, "allreduce")).endswith("a network error (socket closed by peer)")


def test_s3_a_communicator_that_is_never_complete_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fake = FakeNccl()
    ours = Library(fake)
    aborted = threading.Event()
    aborted.set()
    with pytest.raises(BackendError, match="connecting 2 ranks: aborted"):
        ours.connect(2, 0, ours.unique_id(), aborted)
    assert fake.calls == ["init", "abort"]
    alone = ours.connect(1, 0, ours.unique_id(), threading.Event())
    other = fake.Communicator.init(2, 0, fake.get_unique_id(), FakeConfig(blocking=False))
    other.pending = None
    ours.close(other, 0.01)  # its peer never comes
    ours.close(alone, 1.0)
    assert not other.is_valid
    assert not alone.is_valid
    assert fake.calls[2:] == ["init", "init", "finalize", "abort", "finalize", "destroy"]
    assert not fake.violations


# --- what is supported -------------------------------------------------------------------------------------


def test_s3_what_nccl_cannot_do_right_is_not_offered() -> None:
    reductions = {"allreduce", "reduce", "reduce_scatter"}
    assert all(supports(name, kind, None) for name in ("broadcast", "allgather") for kind in DTYPES)
    assert not any(supports("scan", kind, op) for kind in DTYPES for op in ReduceOp)
    for name in reductions:
        for half in (torch.float16, torch.bfloat16):  # rounded at each hop otherwise
            assert [op for op in ReduceOp if supports(name, half, op)] == [ReduceOp.MIN, ReduceOp.MAX]
        taken = [op for op in ReduceOp if supports(name, torch.float32, op)]
        assert taken == [ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD, ReduceOp.MIN, ReduceOp.MAX]
        assert [op for op in ReduceOp if supports(name, torch.complex64, op)] == [ReduceOp.SUM, ReduceOp.MEAN]
        taken = [op for op in ReduceOp if supports(name, torch.bool, op)]
        assert taken == [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.BAND, ReduceOp.BOR]
        assert not any(supports(name, torch.int16, op) for op in ReduceOp)
        assert not supports(name, torch.int64, ReduceOp.BXOR)

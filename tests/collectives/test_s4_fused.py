"""S4: the kernel that reduces several tensors at once, its source compiled for the CPU; and the case without it."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from aiodist.backends.arithmetic import TAKES
from aiodist.collectives.cuda import fused
from aiodist.collectives.cuda.ipc import reduce
from aiodist.testing.seams.transport import Primitive
from aiodist.types import ReduceOp

if TYPE_CHECKING:
    from tests.collectives.conftest import Ranks

one_loop = pytest.mark.asyncio(loop_factories=["asyncio"])
BEFORE = """
#include <cstring>
#define __device__ static inline
#define __global__
#define __launch_bounds__(threads)
#define HALVES
static struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
template <class To, class From> static To seen_as(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static float __uint_as_float(unsigned x) { return seen_as<float>(x); }
static unsigned __float_as_uint(float x) { return seen_as<unsigned>(x); }
#ifdef __F16C__
#include <immintrin.h>
static float of_half(unsigned short x) { return _cvtsh_ss(x); }
static unsigned short to_half(float x) { return _cvtss_sh(x, 0); }
#else
static float of_half(unsigned short x) { return seen_as<_Float16>(x); }
static unsigned short to_half(float x) { return seen_as<unsigned short>((_Float16)x); }
#endif
"""
BEHIND = """
extern "C" void run_NAME(const Arguments *arguments, unsigned blocks) {
    gridDim.x = blocks, blockDim.x = 256;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++) reduce(*arguments);
}
"""


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.device, fused.Shape], fused.Launch | None]:
    """Return a stand-in for `fused.kernel`, whose threads run one after another."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("fused")

    @cache
    def compiled(kind: torch.dtype, op: ReduceOp) -> ctypes.CDLL | None:
        if not fused.source_of(fused.Shape(kind, op, 2, 2)):
            return None
        source = BEFORE
        for ins, outs in SHAPES:
            name = f"{ins}_{outs}"
            made = fused.source_of(fused.Shape(kind, op, ins, outs)) + BEHIND.replace("NAME", name)
            source += f"#define reduce reduce_{name}\nnamespace shape_{name} {{\n{made}}}\n"
        path = folder / f"{op}-{kind}.cpp"
        path.write_text(source)
        flags = ["-mf16c"] * (platform.machine() == "x86_64")
        flags += ["-shared", "-fPIC", "-ffp-contract=off", "-w"]
        subprocess.run(["g++", *flags, "-o", str(path.with_suffix(".so")), str(path)], check=True)
        return ctypes.CDLL(str(path.with_suffix(".so")))

    def kernel(device: torch.device, shape: fused.Shape) -> fused.Launch | None:
        library = compiled(shape.kind, shape.op)

        def launch(arguments: Sequence[int], blocks: int, stream: int) -> None:
            run = getattr(library, f"run_{shape.ins}_{shape.outs}")
            run((ctypes.c_uint64 * len(arguments))(*arguments), min(blocks, 3))

        return None if library is None else launch

    return kernel


@pytest.fixture
def kernels(
    on_cpu: Callable[[torch.device, fused.Shape], fused.Launch | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "kernel", on_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


SHAPES = ((2, 2), (3, 1), (3, 3), (4, 1))
SPECIAL = (torch.nan, torch.inf, -torch.inf, -0.0)


def brought(numel: int, kind: torch.dtype, count: int, starts: Sequence[int]) -> list[Tensor]:
    """Return `count` tensors that begin `starts` elements after aligned memory, in buffers with 64 elements more."""
    made = torch.Generator().manual_seed(numel)
    ts = []
    for i in range(count):
        t = torch.zeros(numel + 64, dtype=kind)[starts[i] : starts[i] + numel]
        if kind.is_floating_point:
            t.copy_(torch.randn(numel, generator=made))
            for at, value in enumerate(SPECIAL):
                t[5 * at + i :: 97] = value
        else:
            info = torch.iinfo(kind)
            t.random_(info.min // 2, info.max // 2, generator=made)
        ts.append(t)
    return ts


def bits(t: Tensor) -> Tensor:
    """Return what is equal where numbers are, also NaN."""
    return t.nan_to_num(77) if t.is_floating_point() else t


CASES = [
    (op, kind)
    for op, kinds in TAKES.items()
    for kind in sorted(kinds, key=str)
    if not kind.is_complex and kind is not torch.bool  # which come as bytes
]


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("op", "kind"), CASES, ids=str)
def test_s4_the_kernel_does_what_torch_does(op: ReduceOp, kind: torch.dtype) -> None:
    """Two and three tensors, with odd sizes, at equal and at different places in words of 16 bytes."""
    for count, numel, starts in product((2, 3), (1, 7, 1000, 4003), ((0, 0, 0), (3, 3, 3), (0, 1, 5))):
        ts = brought(numel, kind, count, starts)
        expected, plain = ts[0].clone(), [t.clone() for t in ts]
        reduce(expected, [expected, *plain[1:]], op)
        out = torch.zeros(numel, dtype=kind)
        if count == 3:
            assert fused.reduce([out], ts, op)
            assert all(torch.equal(bits(t), bits(before)) for t, before in zip(ts, plain, strict=True)), "it only reads"
        assert fused.reduce(ts, ts, op)
        for t in (*ts, *[out] * (count == 3)):
            if op is ReduceOp.MEAN:  # on the CPU torch divides, on a device it multiplies, as the kernel does
                torch.testing.assert_close(t, expected, rtol=2 * torch.finfo(kind).eps, atol=1e-7, equal_nan=True)
            else:
                assert torch.equal(bits(t), bits(expected)), (count, numel, starts)
            assert torch.equal(t.view(torch.uint8), ts[0].view(torch.uint8)), "ranks differ"
        for t in ts:
            behind = t.as_strided((64 - t.storage_offset(),), (1,), t.storage_offset() + numel)
            assert not behind.any(), "it has written behind the end"


@pytest.mark.drawn(1)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_s4_the_kernel_rounds_once(kind: torch.dtype) -> None:
    made = torch.Generator().manual_seed(7)
    ts = [torch.randn(4001, generator=made).to(kind) for _ in range(4)]
    for op in (ReduceOp.SUM, ReduceOp.MEAN):
        out = torch.empty(4001, dtype=kind)
        assert fused.reduce([out], ts, op)
        exact = torch.stack(ts).double().sum(0) / (4 if op is ReduceOp.MEAN else 1)
        assert bool(((out.double() - exact).abs() <= 0.501 * torch.finfo(kind).eps * exact.abs() + 1e-6).all())
    big = [torch.full((9,), 60000.0, dtype=kind) for _ in range(3)]
    assert fused.reduce(big, big, ReduceOp.MEAN)
    assert torch.equal(big[0], torch.full((9,), 60000.0, dtype=kind)), "a mean whose sum is too large for float16"


def test_s4_there_is_no_kernel_for_what_torch_does_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not fused.source_of(fused.Shape(torch.complex64, ReduceOp.SUM, 2, 2))
    monkeypatch.setattr(fused, "compiled", lambda source, capability: pytest.fail("it was compiled"))
    t = torch.ones(3)
    assert not fused.reduce([t], [t] * 17, ReduceOp.SUM)
    assert not fused.reduce([t.to(torch.complex128)], [t.to(torch.complex128)] * 2, ReduceOp.SUM)


@pytest.mark.parametrize("error", [OSError("no compiler"), RuntimeError("it fails"), AttributeError("too old")])
def test_s4_where_nothing_is_compiled_torch_does_it(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fail(source: str, capability: object) -> bytes:
        tried.append(source)
        raise error

    monkeypatch.setattr(fused, "compiled", fail)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fused.kernel.cache_clear()
    t = torch.ones(3)
    assert not fused.reduce([t], [t, t], ReduceOp.SUM)
    assert not fused.reduce([t], [t, t], ReduceOp.SUM)
    assert len(tried) == 1, "what failed is tried again for each operation"
    fused.kernel.cache_clear()


@one_loop
@pytest.mark.usefixtures("simulated_cuda")
@pytest.mark.parametrize("fails", [False, True])
async def test_s4_one_launch_for_all_ranks_of_a_device(
    ranks_of: type[Ranks], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that cannot be launched is done in pieces."""
    seen: list[tuple[int, int, int]] = []

    def reduce(into: Sequence[Tensor], ts: Sequence[Tensor], op: ReduceOp) -> bool:
        seen.append((len(into), len(ts), into[0].numel()))
        if not fails:
            total = ts[0].clone()
            for t in ts[1:]:
                total += t
            for t in into:
                t.copy_(total)
        return not fails

    monkeypatch.setattr(fused, "reduce", reduce)
    ranks = ranks_of(4, shared=True, devices=1)
    parts = ranks_of.brought(4, 1000)
    ts = ranks_of.on_device(parts)
    await ranks.perform(ranks_of.summing(ts))
    assert all(torch.equal(t.cpu(), torch.stack(parts).sum(0)) for t in ts)
    ts = ranks_of.on_device(parts)
    makes = [partial(lambda t, impl, ep: impl.run(ep, [Primitive("reduce", t, root=2)]), t) for t in ts]
    await ranks.perform(makes)
    assert torch.equal(ts[2].cpu(), torch.stack(parts).sum(0))
    assert all(torch.equal(ts[rank].cpu(), parts[rank]) for rank in (0, 1, 3))
    outs = [torch.empty(250, dtype=ts[0].dtype, device="cuda") for _ in range(4)]
    ts = ranks_of.on_device(parts)
    makes = [
        partial(lambda t, out, impl, ep: impl.run(ep, [Primitive("reduce_scatter", t, out, counts=[250] * 4)]), t, out)
        for t, out in zip(ts, outs, strict=True)
    ]
    await ranks.perform(makes)
    assert torch.equal(torch.cat(outs).cpu(), torch.stack(parts).sum(0))
    assert seen == [(4, 4, 1000), (1, 4, 1000), *[(1, 4, 250)] * 4]
    await ranks.close()

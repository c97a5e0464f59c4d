"""Reduces tensors of a CUDA device elementwise by one kernel, which reads each input and writes each output once.

torch adds two tensors at a time. A sum of p tensors for all p ranks takes 2p - 2 kernels with almost twice the memory
traffic. The NVRTC of torch compiles the kernel for each dtype, operator and number of tensors at the first use, in a
tenth of a second. The kernel adds in the fixed order (`schedules.plan.combined`): 16-bit floats in float32, rounded
once. Minima propagate NaN.

CUDA's driver is called with the GIL held, since a launch takes a few microseconds, and a spinning thread would take the
GIL for much longer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, dtype

from aiodist.types import ReduceOp

_log = logging.getLogger("aiodist")
_MOST = 16  # inputs of a kernel, which has a vector of each in registers
_VECTOR_BYTES = 16
_THREADS = 256  # of a block

SOURCE = """
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef HALVES  // a compiler for the CPU has its own
__device__ float of_half(u16 x) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x)); return f; }
__device__ u16 to_half(float f) { u16 x; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x) : "f"(f)); return x; }
#endif
__device__ float of_brain(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ u16 to_brain(float f) {
    u32 x = __float_as_uint(f);
    return f != f ? 0x7fc0 : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}

struct alignas(16) Vector { T x[16 / sizeof(T)]; };
struct Arguments { const T *in[INS]; T *out[OUTS]; u64 numel, head, vectors; };

__device__ A both(A a, A b) { return COMBINE; }
__device__ T total(A *a) {
    #pragma unroll
    for (int half = 1; half < INS; half *= 2) {
        #pragma unroll
        for (int k = 0; k + half < INS; k += 2 * half) a[k] = both(a[k], a[k + half]);
    }
    return STORE(FINISH(a[0]));
}

extern "C" __global__ void __launch_bounds__(256) reduce(Arguments p) {
    const u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
    const u64 width = 16 / sizeof(T), rest = p.numel - p.vectors * width;
    for (u64 i = first; i < p.vectors; i += step) {
        Vector in[INS], result;
        #pragma unroll
        for (int k = 0; k < INS; k++) in[k] = ((const Vector *)(p.in[k] + p.head))[i];
        #pragma unroll
        for (int j = 0; j < width; j++) {
            A a[INS];
            #pragma unroll
            for (int k = 0; k < INS; k++) a[k] = LOAD(in[k].x[j]);
            result.x[j] = total(a);
        }
        #pragma unroll
        for (int k = 0; k < OUTS; k++) ((Vector *)(p.out[k] + p.head))[i] = result;
    }
    for (u64 j = first; j < rest; j += step) {  // in front of the first vector, and behind the last
        const u64 i = j < p.head ? j : j + p.vectors * width;
        A a[INS];
        #pragma unroll
        for (int k = 0; k < INS; k++) a[k] = LOAD(p.in[k][i]);
        const T result = total(a);
        for (int k = 0; k < OUTS; k++) p.out[k][i] = result;
    }
}
"""

_INTEGERS = {torch.uint8: "u8", torch.int8: "signed char", torch.int16: "short", torch.int32: "int"}
_INTEGERS[torch.int64] = "long long"
_WRAPPING = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}  # a signed sum that overflows is undefined in C
_FLOATS = {
    torch.float16: ("u16", "float", "of_half", "to_half"),
    torch.bfloat16: ("u16", "float", "of_brain", "to_brain"),
    torch.float32: ("float", "float", "", ""),
    torch.float64: ("double", "double", "", ""),
}
_COMBINE = {
    ReduceOp.SUM: "a + b",
    ReduceOp.MEAN: "a + b",
    ReduceOp.PROD: "a * b",
    ReduceOp.MIN: "a != a ? a : b != b ? b : b < a ? b : a",
    ReduceOp.MAX: "a != a ? a : b != b ? b : b > a ? b : a",
    ReduceOp.BAND: "a & b",
    ReduceOp.BOR: "a | b",
    ReduceOp.BXOR: "a ^ b",
}


class Shape(NamedTuple):
    """Parameters of a compiled kernel."""

    kind: dtype
    op: ReduceOp
    ins: int
    outs: int


Launch = Callable[[Sequence[int], int, int], None]  # (arguments of the kernel, number of blocks, stream)


def reduce(into: Sequence[Tensor], ts: Sequence[Tensor], op: ReduceOp) -> bool:
    """Queue a kernel on the current stream that writes the reduction of the flat `ts`, in order, to each of `into`.

    The tensors of `into` may also be in `ts`. All tensors have the same dtype and size, and the device of `into[0]` can
    access their memory. Returns False, with no work queued, if there is no such kernel or its launch fails.
    """
    t = into[0]
    launch = kernel(t.device, Shape(t.dtype, op, len(ts), len(into)))
    if launch is None:
        return False
    numel, size, places = t.numel(), t.dtype.itemsize, [each.data_ptr() for each in (*ts, *into)]
    head = vectors = 0  # elements before the first vector, if all tensors have the same alignment
    if all((place - places[0]) % _VECTOR_BYTES == 0 for place in places):
        head = min(-places[0] % _VECTOR_BYTES // size, numel)
        vectors = (numel - head) * size // _VECTOR_BYTES
    blocks = -(-max(vectors, numel - vectors * _VECTOR_BYTES // size) // _THREADS)
    try:
        launch([*places, numel, head, vectors], blocks, torch.cuda.current_stream(t.device).cuda_stream)
    except RuntimeError as error:
        _log.debug("CUDA IPC continues without its kernel: %s", error)
        return False
    return True


@lru_cache(maxsize=256)
def kernel(device: torch.device, shape: Shape) -> Launch | None:
    """Return the launcher of a kernel, compiled at the first call, or None if the compilation fails."""
    if shape.ins > _MOST or not (source := source_of(shape)):
        return None
    try:
        return _load(device, compiled(source, torch.cuda.get_device_capability(device)))
    except (OSError, RuntimeError, AttributeError, TypeError) as error:  # no driver, or no recent compiler
        _log.debug("CUDA IPC continues without a kernel for %s: %s", shape, error)
        return None


def source_of(shape: Shape) -> str:
    """Return the kernel's source (empty for an unsupported dtype)."""
    kind, op, ins, outs = shape
    load = store = ""
    if kind in _FLOATS:
        stored, held, load, store = _FLOATS[kind]
    elif kind in _INTEGERS:
        compares = op in (ReduceOp.MIN, ReduceOp.MAX)
        stored = held = _INTEGERS[kind] if compares else _WRAPPING[kind.itemsize]
    else:
        return ""
    macros = {
        "T": stored,
        "A": held,
        "LOAD(x)": f"{load}(x)",
        "STORE(x)": f"{store}(x)",
        "FINISH(a)": f"((a) / (A){ins})" if op is ReduceOp.MEAN else "(a)",
        "COMBINE": f"(A)({_COMBINE[op]})",
        "INS": ins,
        "OUTS": outs,
    }
    # Definitions in the source, not options: the compiler reads its own headers first, which use names such as T.
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + SOURCE


def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """Return machine code of `source`, or raise OSError without a compiler, RuntimeError for a failed compilation."""
    nvrtc = ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"reduce.cu", 0, None, None))
    try:
        options = (ctypes.c_char_p * 1)(b"--gpu-architecture=sm_%d%d" % capability)
        _check(nvrtc.nvrtcCompileProgram(program, len(options), options))
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _load(device: torch.device, code: bytes) -> Launch:
    driver = ctypes.PyDLL("libcuda.so.1")
    number, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(number), device.index))
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    _check(driver.cuCtxSetCurrent(context))  # torch's context, which may be new for this thread
    _check(driver.cuModuleLoadData(ctypes.byref(module), code))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, b"reduce"))

    def launch(arguments: Sequence[int], blocks: int, stream: int) -> None:
        current = ctypes.c_void_p()
        packed = (ctypes.c_uint64 * len(arguments))(*arguments)
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(packed))
        _check(driver.cuCtxGetCurrent(ctypes.byref(current)))
        if current.value != context.value:  # a repeated call took 0.15 ms in a profile (H100)
            _check(driver.cuCtxSetCurrent(context))
        _check(driver.cuLaunchKernel(function, blocks, 1, 1, _THREADS, 1, 1, 0, ctypes.c_void_p(stream), pointer, None))

    return launch


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA returned error {result}")

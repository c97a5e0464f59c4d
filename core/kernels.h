// Arithmetic on flat memory: reductions of several inputs into several outputs. No state; from any thread.
#ifndef CORE_KERNELS_H
#define CORE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

// The codes of dtypes and operators, in the order of `DTYPES` and `ReduceOp` in Python: append only.
enum core_dtype {
    CORE_BOOL, CORE_U8, CORE_I8, CORE_I16, CORE_I32, CORE_I64, CORE_F16, CORE_BF16, CORE_F32, CORE_F64,
    CORE_C64, CORE_C128, CORE_U16, CORE_U32, CORE_U64, CORE_DTYPES
};
enum core_reduction { CORE_SUM, CORE_MEAN, CORE_PROD, CORE_MIN, CORE_MAX, CORE_BAND, CORE_BOR, CORE_BXOR, CORE_REDUCTIONS };

// One way to reduce: elementwise ins[0] op ins[1] op ... op ins[nins - 1], in this order, divided by `divisor` unless
// that is 1, into each of outs[0 .. nouts - 1]. An output may be exactly one of the inputs, and overlaps nothing else.
// 16-bit floats are combined in float32 and rounded once.
typedef void core_kernel(void *const *outs, int nouts, const void *const *ins, int nins, size_t n, int divisor);

// Returns the kernel for elements of `dtype`, the best that this processor runs; NULL where torch has no such
// operation. A mean has the kernel of the sum. `*scale` is how many of its elements make one of `dtype`.
core_kernel *core_kernel_for(unsigned dtype, unsigned reduction, unsigned *scale);

// Copies `nbytes` that do not overlap past the caches: without reading what lies at `to` first, and without waiting for
// caches of other cores that hold it.
void core_stream(void *to, const void *from, size_t nbytes);

// Returns the size of an element in bytes, 0 for no dtype.
unsigned core_itemsize(unsigned dtype);

// Returns which kernels are chosen: "baseline", "avx2" or "avx512".
const char *core_kernels_level(void);

// Has `core_kernel_for` choose among the first `level` + 1 of baseline, AVX2 and AVX-512, as far as the processor has
// them: for tests.
void core_kernels_limit(int level);

#endif

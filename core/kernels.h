// Arithmetic on flat memory: reductions of several inputs into several outputs. No state; from any thread.
#ifndef CORE_KERNELS_H
#define CORE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The codes of dtypes and operators, in the order of `DTYPES` and `ReduceOp` in Python: append only.
enum core_dtype {
    CORE_BOOL, CORE_U8, CORE_I8, CORE_I16, CORE_I32, CORE_I64, CORE_F16, CORE_BF16, CORE_F32, CORE_F64,
    CORE_C64, CORE_C128, CORE_U16, CORE_U32, CORE_U64, CORE_DTYPES
};
enum core_reduction { CORE_SUM, CORE_MEAN, CORE_PROD, CORE_MIN, CORE_MAX, CORE_BAND, CORE_BOR, CORE_BXOR, CORE_REDUCTIONS };

// A reduction of ins[0 .. nins - 1], elementwise, divided by `divisor` unless that is 1, into each of
// outs[0 .. nouts - 1]. It combines neighbours, then neighbouring pairs, and so on: ((0 1)(2 3))(4 5) for six inputs. With
// `fold` it combines one after another: ((0 1) 2) 3. An output may be exactly one of the inputs, and overlaps no other
// memory. 16-bit floats are combined in float32 and rounded once.
typedef void core_kernel(void *const *outs, int nouts, const void *const *ins, int nins, size_t n, int divisor, bool fold);

// Returns the kernel for elements of `dtype`, the best that this processor runs; NULL if torch has no such operation. A
// mean has the kernel of the sum. `*scale` is the number of the kernel's elements in one of `dtype`.
core_kernel *core_kernel_for(unsigned dtype, unsigned reduction, unsigned *scale);

// Copies `nbytes`, without overlap, past the caches: without first reading the memory at `to`, and without waiting for
// caches of other cores.
void core_stream(void *to, const void *from, size_t nbytes);

// Returns the size of an element in bytes; 0 for an invalid dtype.
unsigned core_itemsize(unsigned dtype);

// Returns the name of the chosen kernels: "baseline", "avx2" or "avx512".
const char *core_kernels_level(void);

// Limits the choice of `core_kernel_for` to the first `level` + 1 of baseline, AVX2 and AVX-512: for tests.
void core_kernels_limit(int level);

#endif

// The kernels for one kind of processor: kernels.c includes this file once for each, with TARGET and NAMED defined.

#define BLOCK_BYTES 4096  // size of an accumulator, which stays in the first cache
#define LEVELS 16  // accumulators, for 2^16 inputs

// Loops whose inputs and outputs are equal or disjoint, so no iteration reads the output of another one.
#if defined(__clang__)
#define APART _Pragma("clang loop vectorize(assume_safety)")
#else
#define APART _Pragma("GCC ivdep")
#endif

// Combines in the order of core_kernel. `sums` are partial results of complete subtrees, the largest subtree first: as
// the digits of a binary number that counts pairs of inputs.
#define KERNEL(NAME, T, A, LOAD, STORE, COMBINE, DIVIDE)                                                              \
    TARGET static void NAMED(NAME)(void *const *outs, int nouts, const void *const *ins, int nins, size_t n,          \
                                   int divisor, bool fold) {                                                          \
        enum { LENGTH = BLOCK_BYTES / sizeof(A) };                                                                    \
        A sums[LEVELS][LENGTH];                                                                                       \
        for (size_t at = 0; at < n; at += LENGTH) {                                                                   \
            size_t m = n - at < LENGTH ? n - at : LENGTH;                                                             \
            int held = 0;                                                                                             \
            for (int q = 0, taken; q < nins; q += taken) {                                                            \
                A *sum = sums[held++];                                                                                \
                const T *a = (const T *)ins[q] + at;                                                                  \
                taken = q + 1 < nins && (q == 0 || !fold) ? 2 : 1;                                                    \
                if (taken == 1) {                                                                                     \
                    APART for (size_t i = 0; i < m; i++) sum[i] = LOAD(a[i]);                                         \
                } else {                                                                                              \
                    const T *b = (const T *)ins[q + 1] + at;                                                          \
                    APART for (size_t i = 0; i < m; i++) sum[i] = COMBINE(LOAD(a[i]), LOAD(b[i]));                    \
                }                                                                                                     \
                for (int pairs = fold ? q > 0 : q / 2; pairs & 1; pairs >>= 1, held--) {                              \
                    A *x = sums[held - 2], *y = sums[held - 1];                                                       \
                    APART for (size_t i = 0; i < m; i++) x[i] = COMBINE(x[i], y[i]);                                  \
                }                                                                                                     \
            }                                                                                                         \
            for (; held > 1; held--) {                                                                                \
                A *x = sums[held - 2], *y = sums[held - 1];                                                           \
                APART for (size_t i = 0; i < m; i++) x[i] = COMBINE(x[i], y[i]);                                      \
            }                                                                                                         \
            A *sum = sums[0];                                                                                         \
            if (divisor > 1)                                                                                          \
                for (size_t i = 0; i < m; i++) sum[i] = DIVIDE(sum[i], divisor);                                      \
            for (int q = 0; q < nouts; q++) {                                                                         \
                T *out = (T *)outs[q] + at;                                                                           \
                for (size_t i = 0; i < m; i++) out[i] = STORE(sum[i]);                                                \
            }                                                                                                         \
        }                                                                                                             \
    }

// As KERNEL, with a fast path without an accumulator for two inputs, the most frequent case, and for their mean.
#define SAME(x) (x)
#define EACH_PAIR(T, VALUE)                                                                                           \
    if (nouts == 1) {                                                                                                 \
        APART for (size_t i = 0; i < n; i++) out[i] = VALUE;                                                          \
    } else {                                                                                                          \
        APART for (size_t i = 0; i < n; i++) {                                                                        \
            T both = VALUE;                                                                                           \
            out[i] = both;                                                                                            \
            also[i] = both;                                                                                           \
        }                                                                                                             \
    }
#define PLAIN(NAME, T, COMBINE, DIVIDE)                                                                               \
    KERNEL(NAME##_any, T, T, SAME, SAME, COMBINE, DIVIDE)                                                             \
    TARGET static void NAMED(NAME)(void *const *outs, int nouts, const void *const *ins, int nins, size_t n,         \
                                   int divisor, bool fold) {                                                          \
        if (nins != 2 || nouts > 2 || divisor > 2) {                                                                  \
            NAMED(NAME##_any)(outs, nouts, ins, nins, n, divisor, fold);                                              \
            return;                                                                                                   \
        }                                                                                                             \
        const T *a = ins[0], *b = ins[1];                                                                             \
        T *out = outs[0], *also = outs[nouts - 1];                                                                    \
        if (divisor == 2) {                                                                                           \
            EACH_PAIR(T, DIVIDE(COMBINE(a[i], b[i]), 2))                                                              \
        } else {                                                                                                      \
            EACH_PAIR(T, COMBINE(a[i], b[i]))                                                                         \
        }                                                                                                             \
    }

#define WHOLE(T, NAME)                                                                                                \
    PLAIN(sum_##NAME, T, ADD, NEVER)                                                                                  \
    PLAIN(prod_##NAME, T, MUL, NEVER)
// Integers wrap as in torch. So integers are combined as unsigned numbers of at least the width of int, since C would
// make narrower ones signed.
#define ADD(x, y) ((__typeof__(x))(1u * (x) + (y)))
#define MUL(x, y) ((__typeof__(x))(1u * (x) * (y)))
#define NEVER(x, divisor) (x)
WHOLE(uint8_t, 8)
WHOLE(uint16_t, 16)
WHOLE(uint32_t, 32)
WHOLE(uint64_t, 64)

#define LESS(x, y) ((x) < (y) ? (x) : (y))
#define MORE(x, y) ((x) > (y) ? (x) : (y))
#define ORDERED(T, NAME)                                                                                              \
    PLAIN(min_##NAME, T, LESS, NEVER)                                                                                 \
    PLAIN(max_##NAME, T, MORE, NEVER)
ORDERED(uint8_t, u8)
ORDERED(int8_t, i8)
ORDERED(uint16_t, u16)
ORDERED(int16_t, i16)
ORDERED(uint32_t, u32)
ORDERED(int32_t, i32)
ORDERED(uint64_t, u64)
ORDERED(int64_t, i64)

#define AND(x, y) ((uint8_t)((x) & (y)))
#define OR(x, y) ((uint8_t)((x) | (y)))
#define XOR(x, y) ((uint8_t)((x) ^ (y)))
PLAIN(band, uint8_t, AND, NEVER)
PLAIN(bor, uint8_t, OR, NEVER)
PLAIN(bxor, uint8_t, XOR, NEVER)

// The minimum or maximum of numbers with a NaN is NaN, as in torch and NumPy.
#define LEAST(x, y) ((x) != (x) || (x) < (y) ? (x) : (y))
#define GREATEST(x, y) ((x) != (x) || (x) > (y) ? (x) : (y))
#define PLUS(x, y) ((x) + (y))
#define TIMES(x, y) ((x) * (y))
#define PER(x, divisor) ((x) / (divisor))
#define REAL(T, NAME)                                                                                                 \
    PLAIN(sum_##NAME, T, PLUS, PER)                                                                                   \
    PLAIN(prod_##NAME, T, TIMES, PER)                                                                                 \
    PLAIN(min_##NAME, T, LEAST, PER)                                                                                  \
    PLAIN(max_##NAME, T, GREATEST, PER)
REAL(float, f32)
REAL(double, f64)

#define HALF(T, NAME, WIDEN, NARROW)                                                                                  \
    KERNEL(sum_##NAME, T, float, WIDEN, NARROW, PLUS, PER)                                                            \
    KERNEL(prod_##NAME, T, float, WIDEN, NARROW, TIMES, PER)                                                          \
    KERNEL(min_##NAME, T, float, WIDEN, NARROW, LEAST, PER)                                                           \
    KERNEL(max_##NAME, T, float, WIDEN, NARROW, GREATEST, PER)
HALF(uint16_t, bf16, widen_bf16, narrow_bf16)
HALF(uint16_t, f16, widen_f16, narrow_f16)

TARGET static inline c64 NAMED(times_c64)(c64 x, c64 y) {
    return (c64){x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
TARGET static inline c128 NAMED(times_c128)(c128 x, c128 y) {
    return (c128){x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}
PLAIN(prod_c64, c64, NAMED(times_c64), NEVER)
PLAIN(prod_c128, c128, NAMED(times_c128), NEVER)

#define BY(NAME) NAMED(NAME)
#define BITS {BY(band), 0}, {BY(bor), 0}, {BY(bxor), 0}
static const struct choice NAMED(table)[CORE_DTYPES][CORE_REDUCTIONS] = {
    // sum, mean, prod, min, max, band, bor, bxor; the second number: elements of the kernel in one of the dtype, 0 for
    // one per byte
    [CORE_BOOL] = {{0}, {0}, {0}, {BY(min_u8), 1}, {BY(max_u8), 1}, BITS},
    [CORE_U8] = {{BY(sum_8), 1}, {0}, {BY(prod_8), 1}, {BY(min_u8), 1}, {BY(max_u8), 1}, BITS},
    [CORE_I8] = {{BY(sum_8), 1}, {0}, {BY(prod_8), 1}, {BY(min_i8), 1}, {BY(max_i8), 1}, BITS},
    [CORE_U16] = {{BY(sum_16), 1}, {0}, {BY(prod_16), 1}, {BY(min_u16), 1}, {BY(max_u16), 1}, BITS},
    [CORE_I16] = {{BY(sum_16), 1}, {0}, {BY(prod_16), 1}, {BY(min_i16), 1}, {BY(max_i16), 1}, BITS},
    [CORE_U32] = {{BY(sum_32), 1}, {0}, {BY(prod_32), 1}, {BY(min_u32), 1}, {BY(max_u32), 1}, BITS},
    [CORE_I32] = {{BY(sum_32), 1}, {0}, {BY(prod_32), 1}, {BY(min_i32), 1}, {BY(max_i32), 1}, BITS},
    [CORE_U64] = {{BY(sum_64), 1}, {0}, {BY(prod_64), 1}, {BY(min_u64), 1}, {BY(max_u64), 1}, BITS},
    [CORE_I64] = {{BY(sum_64), 1}, {0}, {BY(prod_64), 1}, {BY(min_i64), 1}, {BY(max_i64), 1}, BITS},
    [CORE_F16] = {{BY(sum_f16), 1}, {BY(sum_f16), 1}, {BY(prod_f16), 1}, {BY(min_f16), 1}, {BY(max_f16), 1}},
    [CORE_BF16] = {{BY(sum_bf16), 1}, {BY(sum_bf16), 1}, {BY(prod_bf16), 1}, {BY(min_bf16), 1}, {BY(max_bf16), 1}},
    [CORE_F32] = {{BY(sum_f32), 1}, {BY(sum_f32), 1}, {BY(prod_f32), 1}, {BY(min_f32), 1}, {BY(max_f32), 1}},
    [CORE_F64] = {{BY(sum_f64), 1}, {BY(sum_f64), 1}, {BY(prod_f64), 1}, {BY(min_f64), 1}, {BY(max_f64), 1}},
    [CORE_C64] = {{BY(sum_f32), 2}, {BY(sum_f32), 2}, {BY(prod_c64), 1}},
    [CORE_C128] = {{BY(sum_f64), 2}, {BY(sum_f64), 2}, {BY(prod_c128), 1}},
};

#undef BLOCK_BYTES
#undef LEVELS
#undef APART
#undef KERNEL
#undef SAME
#undef EACH_PAIR
#undef PLAIN
#undef WHOLE
#undef ADD
#undef MUL
#undef NEVER
#undef LESS
#undef MORE
#undef ORDERED
#undef AND
#undef OR
#undef XOR
#undef LEAST
#undef GREATEST
#undef PLUS
#undef TIMES
#undef PER
#undef REAL
#undef HALF
#undef BY
#undef BITS

#include "kernels.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

struct choice {
    core_kernel *kernel;
    unsigned scale;
};

typedef struct { float re, im; } c64;
typedef struct { double re, im; } c128;

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// 16-bit floats by integer arithmetic without branches, which compilers vectorise; for the _Float16 of C they emit a
// call for each element. Narrowing rounds to nearest, ties to even.

static inline float widen_bf16(uint16_t x) { return float_of((uint32_t)x << 16); }

static inline uint16_t narrow_bf16(float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

enum { F16_SHIFT = 13, F16_BIAS = (127 - 15) << 23 };  // from the bits of a half to the bits of a float

// Returns `condition ? a : b` without a branch.
static inline int32_t pick(bool condition, int32_t a, int32_t b) { return b ^ ((a ^ b) & -(int32_t)condition); }

static inline float widen_f16(uint16_t x) {
    int32_t size = x & 0x7fff, normal = (size << F16_SHIFT) + F16_BIAS;
    int32_t subnormal = (int32_t)bits_of((float)size * 0x1p-24f);
    int32_t bits = pick(size < 0x0400, subnormal, normal + pick(size < 0x7c00, 0, F16_BIAS));
    return float_of((uint32_t)bits | (uint32_t)(x & 0x8000) << 16);
}

static inline uint16_t narrow_f16(float x) {
    int32_t size = (int32_t)(bits_of(x) & 0x7fffffff);
    int32_t normal = (size + 0xfff + (size >> F16_SHIFT & 1) - F16_BIAS) >> F16_SHIFT;
    int32_t subnormal = (int32_t)(bits_of(float_of((uint32_t)size) + 0.5f) - 0x3f000000);  // the last bit of 0.5f is 2^-24
    int32_t bits = pick(size < 0x477ff000, pick(size < 0x38800000, subnormal, normal), pick(size <= 0x7f800000, 0x7c00, 0x7e00));
    return (uint16_t)((uint32_t)bits | (bits_of(x) >> 16 & 0x8000));
}

// clang warns of loops that it cannot vectorise: products of complex numbers on the oldest processors.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define TARGET
#define NAMED(name) name##_baseline
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#if defined(__x86_64__)
// GCC uses half of a 512-bit register by default. clang uses the whole register, and ignores an attribute with an
// unknown word.
#if defined(__clang__)
#define WIDE
#else
#define WIDE ",prefer-vector-width=512"
#endif

#define TARGET __attribute__((target("avx2")))
#define NAMED(name) name##_avx2
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2" WIDE)))
#define NAMED(name) name##_avx512
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED
#endif

static const struct level {
    const char *name;
    const struct choice (*table)[CORE_REDUCTIONS];
} levels[] = {
    {"baseline", table_baseline},
#if defined(__x86_64__)
    {"avx2", table_avx2},
    {"avx512", table_avx512},
#endif
};

static _Atomic int most = 2;

void core_kernels_limit(int level) { atomic_store_explicit(&most, level, memory_order_relaxed); }

// Returns the number of levels after the first one that this processor runs, and whose registers the kernel saves.
// __builtin_cpu_supports reads only zeros in a program that zig has linked.
static int processor(void) {
#if defined(__x86_64__)
    enum { XMM_AND_YMM = 0x6, AND_ZMM = 0xe6 };
    unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, kept, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    __asm__("xgetbv" : "=a"(kept), "=d"(unused) : "c"(0));
    if ((kept & XMM_AND_YMM) != XMM_AND_YMM || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    return (kept & AND_ZMM) == AND_ZMM && (b & wide) == wide ? 2 : 1;
#else
    return 0;
#endif
}

void core_stream(void *to, const void *from, size_t nbytes) {
#if defined(__x86_64__)
    enum { LINE = 64 };
    uint8_t *target = to;
    const uint8_t *source = from;
    size_t lead = -(uintptr_t)target % LINE;  // the loop below stores whole lines
    if (nbytes < lead + LINE) lead = nbytes;
    memcpy(target, source, lead);
    size_t at = lead;
    for (; at + LINE <= nbytes; at += LINE) {
        __m128i line[LINE / sizeof(__m128i)];
        memcpy(line, source + at, LINE);
        for (size_t i = 0; i < LINE / sizeof *line; i++) _mm_stream_si128((__m128i *)(target + at) + i, line[i]);
    }
    _mm_sfence();  // orders these stores before later ones, also before a release
    memcpy(target + at, source + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

static const struct level *best(void) {
    static _Atomic int known = -1;  // cpuid takes microseconds in a virtual machine
    int runs = atomic_load_explicit(&known, memory_order_relaxed);
    int limit = atomic_load_explicit(&most, memory_order_relaxed);
    if (runs < 0) {
        runs = processor();
        atomic_store_explicit(&known, runs, memory_order_relaxed);
    }
    return &levels[runs < limit ? runs : limit];
}

const char *core_kernels_level(void) { return best()->name; }

unsigned core_itemsize(unsigned dtype) {
    static const uint8_t sizes[CORE_DTYPES] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 2, 4, 8};
    return dtype < CORE_DTYPES ? sizes[dtype] : 0;
}

core_kernel *core_kernel_for(unsigned dtype, unsigned reduction, unsigned *scale) {
    if (dtype >= CORE_DTYPES || reduction >= CORE_REDUCTIONS) return NULL;
    struct choice found = best()->table[dtype][reduction];
    *scale = found.scale ? found.scale : core_itemsize(dtype);
    return found.kernel;
}

#include "kernels.h"

#include <stdatomic.h>
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

static inline float widen_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Rounds to nearest, ties to even.
static inline uint16_t narrow_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0 : rounded);
}

// clang warns where a loop stays as it is: products of complex numbers on the oldest processors.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

#define TARGET
#define NAMED(name) name##_baseline
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#if defined(__x86_64__)
// GCC takes half of a register of 512 bits unless it is told. clang takes all of it, and leaves out the whole attribute
// where one word of it is not its own.
#if defined(__clang__)
#define WIDE
#else
#define WIDE ",prefer-vector-width=512"
#endif

#define TARGET __attribute__((target("avx2,f16c")))
#define NAMED(name) name##_avx2
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c" WIDE)))
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

// Returns how many of the levels after the first one this processor runs, and the kernel keeps the registers of. What
// __builtin_cpu_supports reads is all zeros where zig links.
static int processor(void) {
#if defined(__x86_64__)
    enum { XMM_AND_YMM = 0x6, AND_ZMM = 0xe6 };
    unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, kept, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C)) return 0;
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
    size_t lead = -(uintptr_t)target % LINE;  // whole lines go out at once
    if (nbytes < lead + LINE) lead = nbytes;
    memcpy(target, source, lead);
    size_t at = lead;
    for (; at + LINE <= nbytes; at += LINE) {
        __m128i line[LINE / sizeof(__m128i)];
        memcpy(line, source + at, LINE);
        for (size_t i = 0; i < LINE / sizeof *line; i++) _mm_stream_si128((__m128i *)(target + at) + i, line[i]);
    }
    _mm_sfence();  // these stores are in no order with others else, a release among them
    memcpy(target + at, source + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}

static const struct level *best(void) {
    static _Atomic int known = -1;  // a virtual machine takes microseconds to answer
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

#include "kernels.h"

#include <stdatomic.h>
#include <string.h>

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

#define TARGET
#define NAMED(name) name##_baseline
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,f16c")))
#define NAMED(name) name##_avx2
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,prefer-vector-width=512")))
#define NAMED(name) name##_avx512
#include "kernels_of_target.h"
#undef TARGET
#undef NAMED
#endif

typedef const struct choice (*table)[CORE_REDUCTIONS];

static _Atomic int most = 2;

void core_kernels_limit(int level) { atomic_store_explicit(&most, level, memory_order_relaxed); }

static int level(void) {
#if defined(__x86_64__)
    int limit = atomic_load_explicit(&most, memory_order_relaxed);
    __builtin_cpu_init();
    if (limit >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return 2;
    if (limit >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return 1;
#endif
    return 0;
}

static table best(void) {
#if defined(__x86_64__)
    table const tables[] = {table_baseline, table_avx2, table_avx512};
    return tables[level()];
#else
    return table_baseline;
#endif
}

const char *core_kernels_level(void) {
    static const char *const names[] = {"baseline", "avx2", "avx512"};
    return names[level()];
}

unsigned core_itemsize(unsigned dtype) {
    static const uint8_t sizes[CORE_DTYPES] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 2, 4, 8};
    return dtype < CORE_DTYPES ? sizes[dtype] : 0;
}

core_kernel *core_kernel_for(unsigned dtype, unsigned reduction, unsigned *scale) {
    if (dtype >= CORE_DTYPES || reduction >= CORE_REDUCTIONS) return NULL;
    struct choice found = best()[dtype][reduction];
    *scale = found.scale ? found.scale : core_itemsize(dtype);
    return found.kernel;
}

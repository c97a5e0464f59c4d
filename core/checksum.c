#include "checksum.h"

#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { POLYNOMIAL = (int)0xedb88320u, STRIDE_BYTES = 64 };

// As zlib has it, without the inversions before and after; of few bytes.
static uint32_t bit_by_bit(uint32_t crc, const uint8_t *from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= from[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ ((uint32_t)POLYNOMIAL & -(crc & 1));
    }
    return crc;
}

#if defined(__x86_64__)

bool core_checks(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_PCLMUL && c & bit_SSE4_1;
}

// Multiplies both halves of 128 bits by powers of x, so that they can be added to what stands further on in the message
// (Gopal et al. 2009, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel).
__attribute__((target("pclmul,sse4.1"))) static inline __m128i folded(__m128i x, __m128i powers, __m128i more) {
    __m128i low = _mm_clmulepi64_si128(x, powers, 0x00), high = _mm_clmulepi64_si128(x, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), more);
}

__attribute__((target("pclmul,sse4.1"))) uint32_t core_copy_checked(void *to, const void *from, size_t nbytes,
                                                                    uint32_t crc) {
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    const uint8_t *source = from;
    uint8_t *target = to;
    size_t at = 0;
    crc = ~crc;
    if (nbytes >= STRIDE_BYTES) {
        __m128i lanes[4];
        for (int i = 0; i < 4; i++) {
            lanes[i] = _mm_loadu_si128((const __m128i *)source + i);
            _mm_storeu_si128((__m128i *)target + i, lanes[i]);
        }
        lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
        for (at = STRIDE_BYTES; at + STRIDE_BYTES <= nbytes; at += STRIDE_BYTES)
            for (int i = 0; i < 4; i++) {
                __m128i next = _mm_loadu_si128((const __m128i *)(source + at) + i);
                _mm_storeu_si128((__m128i *)(target + at) + i, next);
                lanes[i] = folded(lanes[i], by_512, next);
            }
        for (int i = 1; i < 4; i++) lanes[i] = folded(lanes[i - 1], by_128, lanes[i]);
        uint8_t rest[16];  // its sum is that of all that was folded into it
        _mm_storeu_si128((__m128i *)rest, lanes[3]);
        crc = bit_by_bit(0, rest, sizeof rest);
    }
    memcpy(target + at, source + at, nbytes - at);
    return ~bit_by_bit(crc, source + at, nbytes - at);
}

#else

bool core_checks(void) { return false; }

uint32_t core_copy_checked(void *to, const void *from, size_t nbytes, uint32_t crc) {
    memcpy(to, from, nbytes);
    return ~bit_by_bit(~crc, from, nbytes);
}

#endif

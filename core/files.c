#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { STRIDE_BYTES = 64, PAGE_BYTES = 4096, SLICES = 8 };

// --- checksums ---------------------------------------------------------------------------------------------------

static uint32_t tables[SLICES][256];  // table i: the checksum of each byte followed by i zero bytes
static pthread_once_t filled_once = PTHREAD_ONCE_INIT;

static void fill_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
        tables[0][byte] = crc;
    }
    for (int i = 1; i < SLICES; i++)
        for (int byte = 0; byte < 256; byte++) {
            uint32_t before = tables[i - 1][byte];
            tables[i][byte] = before >> 8 ^ tables[0][before & 255];
        }
}

// The CRC-32 of zlib without the inversions before and after; eight bytes at a time (Kounavis and Berry 2008).
static uint32_t by_tables(uint32_t crc, const uint8_t *from, size_t nbytes) {
    size_t at = 0;
    for (; at + SLICES <= nbytes; at += SLICES) {
        uint32_t next = 0;
        for (int i = 0; i < SLICES; i++) {
            uint8_t byte = from[at + i] ^ (uint8_t)(i < 4 ? crc >> 8 * i : 0);
            next ^= tables[SLICES - 1 - i][byte];
        }
        crc = next;
    }
    for (; at < nbytes; at++) crc = crc >> 8 ^ tables[0][(crc ^ from[at]) & 255];
    return crc;
}

#if defined(__x86_64__)

static bool multiplies(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_PCLMUL && c & bit_SSE4_1;
}

// Multiplies both halves of 128 bits by powers of x, so that they can be added to later bits of the message (Gopal et
// al. 2009, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel).
__attribute__((target("pclmul,sse4.1"))) static inline __m128i folded(__m128i x, __m128i powers, __m128i more) {
    __m128i low = _mm_clmulepi64_si128(x, powers, 0x00), high = _mm_clmulepi64_si128(x, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), more);
}

// Copies as many whole strides as there are, at least one, and updates their checksum; returns their bytes.
__attribute__((target("pclmul,sse4.1"))) static size_t copy_strides(uint8_t *to, const uint8_t *from, size_t nbytes,
                                                                    uint32_t *crc) {
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) {
        lanes[i] = _mm_loadu_si128((const __m128i *)from + i);
        _mm_storeu_si128((__m128i *)to + i, lanes[i]);
    }
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)*crc));
    size_t at = STRIDE_BYTES;
    for (; at + STRIDE_BYTES <= nbytes; at += STRIDE_BYTES)
        for (int i = 0; i < 4; i++) {
            __m128i next = _mm_loadu_si128((const __m128i *)(from + at) + i);
            _mm_storeu_si128((__m128i *)(to + at) + i, next);
            lanes[i] = folded(lanes[i], by_512, next);
        }
    for (int i = 1; i < 4; i++) lanes[i] = folded(lanes[i - 1], by_128, lanes[i]);
    uint8_t rest[16];  // its checksum equals that of all folded bytes
    _mm_storeu_si128((__m128i *)rest, lanes[3]);
    *crc = by_tables(0, rest, sizeof rest);
    return at;
}

#else

static bool multiplies(void) { return false; }

static size_t copy_strides(uint8_t *to, const uint8_t *from, size_t nbytes, uint32_t *crc) {
    (void)to, (void)from, (void)nbytes, (void)crc;
    return 0;
}

#endif

// Copies `nbytes`, without overlap, and returns zlib's CRC-32 of earlier bytes, which is `crc`, and of these bytes.
static uint32_t copy_checked(void *to, const void *from, size_t nbytes, uint32_t crc) {
    uint8_t *target = to;
    const uint8_t *source = from;
    size_t at = 0;
    pthread_once(&filled_once, fill_tables);
    crc = ~crc;
    if (nbytes >= STRIDE_BYTES && multiplies()) at = copy_strides(target, source, nbytes, &crc);
    if (at < nbytes) memcpy(target + at, source + at, nbytes - at);
    return ~by_tables(crc, source + at, nbytes - at);
}

// --- files -------------------------------------------------------------------------------------------------------

// Switches O_DIRECT off; true if it was on.
static bool back_to_cache(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && flags & O_DIRECT && fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

static int write_all(int fd, const char *from, size_t nbytes) {
    while (nbytes > 0) {
        ssize_t written = write(fd, from, nbytes < PAGE_BYTES ? nbytes : nbytes / PAGE_BYTES * PAGE_BYTES);
        if (written >= 0) from += written, nbytes -= (size_t)written;
        else if (errno != EINTR && !(errno == EINVAL && back_to_cache(fd))) return errno;
    }
    return 0;
}

typedef struct {
    pthread_t thread;
    bool started;  // true if there is a thread to join
    int fd, error;
    const char *from;
    size_t nbytes;
} Writing;

static void *write_one(void *given) {
    Writing *writing = given;
    writing->error = write_all(writing->fd, writing->from, writing->nbytes);
    return NULL;
}

static int finish(Writing *writing) {
    if (writing->started) pthread_join(writing->thread, NULL);
    writing->started = false;
    return writing->error;
}

// Begins to write a filled half after the write of the previous half; returns the errno of the previous write.
static int begin(Writing *writing, const char *from, size_t nbytes) {
    int error = finish(writing);
    if (error != 0) return error;
    writing->from = from, writing->nbytes = nbytes;
    writing->started = pthread_create(&writing->thread, NULL, write_one, writing) == 0;
    if (!writing->started) write_one(writing);  // no more threads
    return 0;
}

int core_write_checked(int fd, char *memory, size_t half_bytes, core_part *parts, size_t count) {
    Writing writing = {.fd = fd};
    char *half = memory;
    size_t filled = 0;
    int error = 0;
    for (core_part *part = parts; part < parts + count; part++)
        for (size_t at = 0; at < part->nbytes && error == 0;) {
            size_t room = half_bytes - filled, left = part->nbytes - at, nbytes = left < room ? left : room;
            part->crc = copy_checked(half + filled, (const char *)part->from + at, nbytes, part->crc);
            at += nbytes, filled += nbytes;
            if (filled == half_bytes) {
                error = begin(&writing, half, filled);
                half = half == memory ? memory + half_bytes : memory;
                filled = 0;
            }
        }
    if (filled > 0 && error == 0) begin(&writing, half, filled);
    return finish(&writing);  // an earlier error is still stored in `writing`
}

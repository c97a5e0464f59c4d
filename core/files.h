// Writing memory to a file with its checksums. No state; from any thread.
#ifndef CORE_FILES_H
#define CORE_FILES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const void *from;
    size_t nbytes;
    uint32_t crc;  // the CRC-32 of zlib of what stands before these bytes; then of all
} core_part;

// Writes the parts one behind another to where `fd` stands; returns 0, or the errno of what failed.
// They go through the two halves of `memory`, each of `half_bytes`: one is written while the other is filled. Where `fd`
// is past the cache of the kernel (O_DIRECT), it is so no more behind what cannot be: less than a page at the end, any
// piece for some file systems.
int core_write_checked(int fd, char *memory, size_t half_bytes, core_part *parts, size_t count);

#endif

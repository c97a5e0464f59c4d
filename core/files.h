// Writing memory to a file with its checksums. No state; from any thread.
#ifndef CORE_FILES_H
#define CORE_FILES_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const void *from;
    size_t nbytes;
    uint32_t crc;  // the CRC-32 of zlib of the preceding bytes; after the call, it includes these bytes
} core_part;

// Writes the parts in order at the position of `fd`; returns 0, or the errno of the failed call.
// The parts go through the two halves of `memory`, each of `half_bytes`: one is written while the other is filled. If
// `fd` bypasses the kernel's cache (O_DIRECT), the first write that cannot do that switches O_DIRECT off: the last one
// of less than a page, or any write in some file systems.
int core_write_checked(int fd, char *memory, size_t half_bytes, core_part *parts, size_t count);

#endif

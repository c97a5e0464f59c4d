// Copying bytes and summing them up in one pass. No state; from any thread.
#ifndef CORE_CHECKSUM_H
#define CORE_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Returns whether this processor has carry-less multiplication, without which `core_copy_checked` is slow.
bool core_checks(void);

// Copies `nbytes` that do not overlap; returns the CRC-32 of zlib of what `crc` is that of, and these behind it.
uint32_t core_copy_checked(void *to, const void *from, size_t nbytes, uint32_t crc);

#endif

// Parts of many sizes, written to a file through two halves, are there, and have the checksums of the definition.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../files.h"

enum { MOST = 40000, PARTS = 5, PAGE_BYTES = 4096 };

static uint32_t defined(uint32_t crc, const uint8_t *from, size_t nbytes) {
    crc = ~crc;
    for (size_t i = 0; i < nbytes; i++) {
        crc ^= from[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0xedb88320u & -(crc & 1));
    }
    return ~crc;
}

static void attempt(const char *path, int flags, size_t half_bytes) {
    static uint8_t data[PARTS * MOST], seen[PARTS * MOST];
    core_part parts[PARTS];
    uint32_t sums[PARTS];
    size_t nbytes = 0;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)rand();
    for (int i = 0; i < PARTS; i++) {
        parts[i] = (core_part){data + nbytes, (size_t)rand() % (i % 2 ? 200 : MOST), (uint32_t)rand()};
        sums[i] = defined(parts[i].crc, data + nbytes, parts[i].nbytes);
        nbytes += parts[i].nbytes;
    }
    char *memory = aligned_alloc(PAGE_BYTES, 2 * half_bytes);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
    if (core_write_checked(fd, memory, half_bytes, parts, PARTS) != 0) perror("written"), exit(1);
    for (int i = 0; i < PARTS; i++)
        if (parts[i].crc != sums[i]) printf("part %d: %08x of %08x\n", i, parts[i].crc, sums[i]), exit(1);
    if (pread(fd, seen, sizeof seen, 0) != (ssize_t)nbytes || memcmp(seen, data, nbytes)) puts("other bytes"), exit(1);
    close(fd);
    free(memory);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int times = atoi(arguments[2]);
    for (int i = 0; i < times; i++) {
        attempt(arguments[1], 0, PAGE_BYTES << i % 5);
        attempt(arguments[1], O_DIRECT, PAGE_BYTES << i % 5);
    }
    core_part part = {"less than a page", 17, 0};
    char memory[64];
    int full = open("/dev/full", O_WRONLY);
    if (core_write_checked(full, memory, 32, &part, 1) == 0) puts("nothing failed"), exit(1);
    close(full);
    printf("%d files\n", times);
    return 0;
}

// The description of a torch tensor in one call, without creating objects: the needed part of DLPack's C exchange
// functions (version 1.3, https://dmlc.github.io/dlpack/latest/c_api.html), which defines these layouts.
#ifndef CORE_DLPACK_H
#define CORE_DLPACK_H

#include <stdint.h>

enum { DL_MAJOR = 1, DL_CPU = 1, DL_COMPLEX = 5 };

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t dtype_code, dtype_bits;
    uint16_t dtype_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *(*unused[3])(void);
    int (*describe)(void *tensor, dl_tensor *);  // -1 with an exception set
    void *(*stream)(void);
} dl_exchange;

// Returns the number of elements of a contiguous tensor in host memory; -1 for other tensors.
static inline int64_t dl_dense_numel(const dl_tensor *t) {
    if (t->device_type != DL_CPU) return -1;
    int64_t numel = 1;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        // An odd stride of a dimension of one element may be a view that torch negates when it reads it.
        if (t->strides != NULL && t->strides[i] != numel) return -1;
        numel *= t->shape[i];
    }
    return numel;
}

#endif

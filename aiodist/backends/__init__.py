"""Backends: `local`, `mpi`, `gloo` and `shm` connect ranks. `nccl` and `cuda_ipc` are for CUDA tensors."""

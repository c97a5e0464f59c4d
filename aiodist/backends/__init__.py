"""What moves data: `local`, `mpi`, `gloo` and `shm` carry ranks; `nccl` and `cuda_ipc` are for CUDA tensors."""

"""Collectives on CUDA tensors by NCCL, in device memory that processes share, or staged through the host."""

"""Collectives of tensors on CUDA devices: by NCCL, by memory that processes share, or by way of the host."""

"""One native library each: `local` (this process), `mpi` (mpi4py), `gloo` (torch.distributed)."""

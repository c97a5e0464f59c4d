"""Interfaces of other libraries: `aiodist.compat.mpi`."""

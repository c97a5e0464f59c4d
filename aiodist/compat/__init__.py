"""Fronts in the shape of other libraries: `aiodist.compat.mpi`."""

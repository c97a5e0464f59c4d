"""Starts the ranks of a job and watches over them; imports neither torch, numpy nor mpi4py.

`job.run(Job(...))` is what `aiodist run` calls. Every rank runs below a small guard process (`worker`), which
carries its output and the way it ended to the launcher, whether the launcher itself or an mpirun started it.
"""

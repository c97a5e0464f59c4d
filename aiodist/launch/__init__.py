"""Starts the ranks of a job and watches over them; imports neither torch, numpy nor mpi4py.

`aiodist run` calls `job.run(Job(...))`. Every rank has a small guard process (`worker`), which sends its output and its
exit to the launcher. The launcher or an mpirun starts the guards.
"""

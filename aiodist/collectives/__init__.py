"""Executes collectives by programs of steps, over messages, a library's collectives or shared memory."""

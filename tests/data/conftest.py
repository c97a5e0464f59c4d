"""Fixtures of data tests: one thread for torch, since readers and workers have threads too."""

from tests.support.one_thread import one_thread as one_thread

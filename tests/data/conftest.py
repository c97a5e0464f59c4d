"""What the tests of data share: one thread for torch, since readers and workers have threads of their own."""

from tests.support.one_thread import one_thread as one_thread

"""Helpers of the tests of codecs: one thread for torch, since their matrices are small."""

from tests.support.one_thread import one_thread as one_thread

"""Fewer bytes on the way: codecs for tensors, what keeps their losses, and codecs for Python objects.

`code.nbytes` is what a code weighs. Nothing here unpickles anything, but for `Pickle`, which must be asked for by name.
"""

from aiodist.codecs.base import Codec, ObjectCodec
from aiodist.codecs.difference import Incoming, Outgoing
from aiodist.codecs.feedback import ErrorFeedback
from aiodist.codecs.half import Half
from aiodist.codecs.lossless import Lossless
from aiodist.codecs.objects import Json, Pickle
from aiodist.codecs.qsgd import QSGD
from aiodist.codecs.topk import TopK

__all__ = [
    "QSGD",
    "Codec",
    "ErrorFeedback",
    "Half",
    "Incoming",
    "Json",
    "Lossless",
    "ObjectCodec",
    "Outgoing",
    "Pickle",
    "TopK",
]

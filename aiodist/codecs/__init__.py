"""Compression: codecs for tensors, error feedback, and codecs for Python objects.

`code.nbytes` is the size of a code. Only `Pickle`, which must be chosen by name, unpickles anything.
"""

from aiodist.codecs.base import Codec, ObjectCodec
from aiodist.codecs.exact import Json, Lossless, Pickle
from aiodist.codecs.feedback import ErrorFeedback, Incoming, Outgoing
from aiodist.codecs.gradients import Exchange, Gather, GradientCodec, Gradients, NarrowSum, RoundingLoss, Sum
from aiodist.codecs.lowrank import SVD, PowerSGD
from aiodist.codecs.narrow import QSGD, BFloat16, Half, Int8, Sign, TernGrad
from aiodist.codecs.sparse import RandomK, TopK

__all__ = [
    "QSGD",
    "SVD",
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Exchange",
    "Gather",
    "GradientCodec",
    "Gradients",
    "Half",
    "Incoming",
    "Int8",
    "Json",
    "Lossless",
    "NarrowSum",
    "ObjectCodec",
    "Outgoing",
    "Pickle",
    "PowerSGD",
    "RandomK",
    "RoundingLoss",
    "Sign",
    "Sum",
    "TernGrad",
    "TopK",
]

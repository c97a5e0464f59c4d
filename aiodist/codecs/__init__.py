"""Fewer bytes on the way: codecs for tensors, what keeps their losses, and codecs for Python objects.

`code.nbytes` is what a code weighs. Nothing here unpickles anything, but for `Pickle`, which must be asked for by name.
"""

from aiodist.codecs.base import Codec, ObjectCodec
from aiodist.codecs.difference import Incoming, Outgoing
from aiodist.codecs.feedback import ErrorFeedback
from aiodist.codecs.gradients import Exchange, Gather, GradientCodec, Gradients, NarrowSum, RoundingLoss, Sum
from aiodist.codecs.half import BFloat16, Half
from aiodist.codecs.lossless import Lossless
from aiodist.codecs.lowrank import SVD, PowerSGD
from aiodist.codecs.objects import Json, Pickle
from aiodist.codecs.qsgd import QSGD, TernGrad
from aiodist.codecs.scaled import Int8, Sign
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

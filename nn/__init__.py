"""Training on many ranks: gradients reduced while backward goes on, and what belongs to it."""

from aiodist.nn.data_parallel import DataParallel, DataParallelStatistics
from aiodist.nn.pipelined import PipelinedOptimizer
from aiodist.nn.synchronize import assert_synchronized, synchronize_gradients, synchronize_parameters

__all__ = [
    "DataParallel",
    "DataParallelStatistics",
    "PipelinedOptimizer",
    "assert_synchronized",
    "synchronize_gradients",
    "synchronize_parameters",
]

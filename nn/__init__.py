"""Training on many ranks: gradient reduction during backward, distributed optimizers and layers."""

from aiodist.nn import functional
from aiodist.nn.batch_norm import SyncBatchNorm
from aiodist.nn.blocks import BlockSequential
from aiodist.nn.compression import Compression
from aiodist.nn.data_parallel import DataParallel, DataParallelStatistics
from aiodist.nn.local_sgd import Elastic, LocalSGD, SlowMo
from aiodist.nn.pipelined import PipelinedOptimizer
from aiodist.nn.sharded import ShardedOptimizer
from aiodist.nn.synchronize import assert_synchronized, synchronize_gradients, synchronize_parameters
from aiodist.nn.tensor_parallel import ColumnLinear, RowLinear, VocabEmbedding, full_state_dict, split_state_dict

__all__ = [
    "BlockSequential",
    "ColumnLinear",
    "Compression",
    "DataParallel",
    "DataParallelStatistics",
    "Elastic",
    "LocalSGD",
    "PipelinedOptimizer",
    "RowLinear",
    "ShardedOptimizer",
    "SlowMo",
    "SyncBatchNorm",
    "VocabEmbedding",
    "assert_synchronized",
    "full_state_dict",
    "functional",
    "split_state_dict",
    "synchronize_gradients",
    "synchronize_parameters",
]

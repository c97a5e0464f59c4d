"""Whether this torch can move tensors into shared memory, for tests of `to_arena_` and its parts."""

from __future__ import annotations

import pytest
import torch

needs_moving = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason=f"torch {torch.__version__} cannot move tensors: expected 2.13 or later",
)

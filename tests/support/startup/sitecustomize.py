"""Makes Python import torch without the garbage collector, each of whose later runs would take 0.1 s.

Every process that a quick run of the tests starts has this folder on its PYTHONPATH, so that it imports this module
first. An import of torch and the end of the process take 0.5 s less, of 1.6 s. Later garbage is collected as usual.

A rank of a job of tests hands over to the nursery that NURSERY_OF_JOBS names, if any.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Torch(PathFinder):
    """Finds torch once, and has it loaded without collections."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def without_collections(module: ModuleType) -> None:
            gc.disable()
            try:
                load(module)
            finally:
                gc.freeze()
                gc.enable()

        spec.loader.exec_module = without_collections  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Torch)

if "NURSERY_OF_JOBS" in os.environ and sys.orig_argv[1:-1] == ["-m", "aiodist.testing.jobs"]:
    from tests.support.stub import main

    sys.argv = ["", os.environ["NURSERY_OF_JOBS"], *sys.orig_argv[-3:]]
    os._exit(main())

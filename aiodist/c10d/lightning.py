"""`strategy="aiodist"` for Lightning's `Trainer` and `Fabric`: DDP over aiodist. The import registers the strategy."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import aiodist.c10d  # noqa: F401 - registers the backend
from aiodist.errors import BackendUnavailable

_REGISTRIES = (
    ("lightning", "lightning.pytorch.strategies", "StrategyRegistry"),
    ("lightning", "lightning.fabric.strategies", "STRATEGY_REGISTRY"),
    ("pytorch_lightning", "pytorch_lightning.strategies", "StrategyRegistry"),
)


def _register() -> None:
    """Register the strategy with the imported packages of Lightning, or with all installed ones."""
    packages = {package for package, *_ in _REGISTRIES}
    there = packages & sys.modules.keys() or {package for package in packages if find_spec(package)}
    if not there:
        raise BackendUnavailable("aiodist.c10d.lightning needs Lightning: pip install lightning")
    for package, name, registry in _REGISTRIES:
        if package in there:
            strategies = import_module(name)
            getattr(strategies, registry).register(
                "aiodist",
                strategies.DDPStrategy,
                description="DDP over aiodist",
                override=True,
                process_group_backend="aiodist",
            )


_register()

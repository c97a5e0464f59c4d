"""Lets `init_process_group` of torch give aiodist's process groups under the name of AIODIST_AS.

A program starts without torch: the change is made when it imports `torch.distributed`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from aiodist.env import alias, variables

_TORCH = "torch.distributed"


def install() -> None:
    """Give programs of this process aiodist's process groups by the name of AIODIST_AS, if it is set."""
    if not variables().get("AIODIST_AS") or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _TORCH in sys.modules:  # another start-up file has imported it
        _rename(sys.modules[_TORCH])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds `torch.distributed` once, with the loader of the other finders in a `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader)
        return spec


class _Loader(Loader):
    """Loads `torch.distributed` as `loader` does, then renames the backend."""

    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _rename(module)


def _rename(dist: ModuleType) -> None:
    """Let the functions of `torch.distributed` that make a group take aiodist for the backend of AIODIST_AS."""
    c10d: Any = sys.modules.get(f"{_TORCH}.distributed_c10d")
    if c10d is None or hasattr(c10d._new_process_group_helper, "__wrapped__"):  # torch has no torch.distributed
        return
    name = variables()["AIODIST_AS"]
    c10d.Backend.default_device_backend_map.update(cpu=name, cuda=name)
    if name == "nccl" and c10d.default_pg_nccl_timeout is None:  # torch has no NCCL, and would ask for these
        c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
        sys.modules["torch._C"].__dict__.update(_nccl_version=lambda: 0, _nccl_version_suffix=lambda: b"")
    setattr(dist, f"is_{name}_available", lambda: True)
    c10d._new_process_group_helper = _renamed(c10d, c10d._new_process_group_helper)
    c10d.rendezvous = _registered(c10d.rendezvous)


def _registered(rendezvous: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `rendezvous` of torch with the rendezvous of aiodist for ranks without torch's variables."""

    @wraps(rendezvous)
    def meet(*args: object, **named: object) -> object:
        import aiodist.c10d  # noqa: F401 - registers

        return rendezvous(*args, **named)

    return meet


def _renamed(c10d: Any, make: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:  # noqa: ANN401
    """Return torch's function that makes a group, with aiodist for the backend of AIODIST_AS.

    The group keeps the name that the program gave. Raises `ConfigError` for an unknown name in AIODIST_AS.
    """

    @wraps(make)
    def make_group(
        size: int, rank: int, ranks: Sequence[int], backend: str, store: object, *args: object, **named: object
    ) -> tuple[Any, Any]:
        name = alias()
        asked = (name or "") if backend == c10d.Backend.UNDEFINED else str(backend)
        if name is None or name not in {one.rpartition(":")[2] for one in asked.split(",")}:
            return make(size, rank, ranks, backend, store, *args, **named)
        import aiodist.c10d  # noqa: F401 - registers

        if size < 0:  # torch leaves rank and size to MPI
            met, rank, size = next(c10d.rendezvous("env://", timeout=named["timeout"]))
            store = c10d.PrefixStore("default_pg", met)
        group, its_store = make(size, rank, ranks, "aiodist", store, *args, **named)
        if its_store is not None:  # None: this rank is not in the group
            c10d._world.pg_map[group] = c10d.Backend(asked), its_store
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(asked)))
        return group, its_store

    return make_group

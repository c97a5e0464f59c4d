"""What is computed with tensors of simulated devices: queued on a stream, and done later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch._C import _current_graph_task_id, _DisableTorchDispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.support.simulated_cuda.copies import copy, foreach_copy, launch, make_room
from tests.support.simulated_cuda.device import SimulatedCuda, active
from tests.support.simulated_cuda.memory import Allocation, seen_as
from tests.support.simulated_cuda.tensor import DeviceTensor

# They ask about shapes and types, never about what is in the memory.
_OF_METADATA: Final = frozenset({"_fused_sdp_choice", "is_same_size", "_has_same_storage_numel"})
# The CPU's kernels keep statistics in another type than those of other devices: only a try tells which.
_BY_EXAMPLE: Final = frozenset({"native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm"})
_SHAPES: Final = 4096  # the number of shapes that are kept
_shapes: Final[dict[object, Any]] = {}
_TAKE_HOST_INDICES: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


class SimulatedTensor(DeviceTensor):
    """A tensor in the memory of a simulated device: what is computed with it is queued on the current stream."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        schema = _schema_of(func)
        if schema.name == "copy_":
            copy(*args, **kwargs)
            return args[0]
        if schema.name == "_foreach_copy_":
            return foreach_copy(*args, **kwargs)
        if schema.name.startswith("_foreach_") and (parts := _by_device(args)):
            return _in_parts(func, args, kwargs, parts)
        if schema.name == "resize_":
            make_room(args[0], args[1])
        if schema.at_once:
            return _at_once(func, args, kwargs)
        launch = _Launch(active(), schema, args, kwargs)
        if schema.waits:
            return launch.wait(func, "implicit")
        return launch.queue(func)


def _by_device(args: tuple[Any, ...]) -> list[list[int]]:
    """Return the positions of the lists by device; an empty list if all are on one device."""
    found: dict[int, list[int]] = {}
    for position, t in enumerate(args[0]):
        found.setdefault(t.cuda_index if isinstance(t, SimulatedTensor) else -1, []).append(position)
    return list(found.values()) if len(found) > 1 else []


def _in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: list[list[int]]) -> Any:
    """Run an operator on lists for each device by itself."""
    count = len(args[0])
    results: list[Any] = [None] * count

    def part(value: Any, positions: list[int]) -> Any:
        return [value[i] for i in positions] if isinstance(value, list | tuple) and len(value) == count else value

    for positions in parts:
        made = func(*(part(a, positions) for a in args), **{key: part(a, positions) for key, a in kwargs.items()})
        for position, result in zip(positions, made or (), strict=False):
            results[position] = result
    return results if _schema_of(func).returns else None


class _OperatorSchema(NamedTuple):
    """The parts of an operator's schema."""

    name: str
    at_once: bool  # no data is touched: a view, or a change of a tensor's shape
    waits: bool  # what it returns, or its shape, depends on the data
    returns: tuple[int | str | None, ...]  # for each result, the argument that it is, or None for a new one


@functools.cache
def _schema_of(func: Any) -> _OperatorSchema:
    schema, tags = func._schema, func.tags
    name = schema.name.removeprefix("aten::")
    written: dict[frozenset[str], int | str] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written[frozenset(argument.alias_info.before_set)] = argument.name if argument.kwarg_only else position
    returns: list[int | str | None] = []
    view = False
    for info in (result.alias_info for result in schema.returns):
        view |= info is not None and not info.is_write
        returns.append(written.get(frozenset(info.before_set)) if info is not None and info.is_write else None)
    at_once = view or torch.Tag.inplace_view in tags or name in _OF_METADATA
    tensorless = any("Tensor" not in str(result.type) for result in schema.returns)
    dynamic = torch.Tag.dynamic_output_shape in tags and name != "index"  # which is, with a mask only
    return _OperatorSchema(
        name, at_once, torch.Tag.data_dependent_output in tags or tensorless or dynamic, tuple(returns)
    )


def _at_once(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that touches no data; its result shares the memory of its input."""
    index = next(leaf.cuda_index for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, SimulatedTensor))

    def ours(made: object) -> object:
        if isinstance(made, torch.Tensor) and not isinstance(made, SimulatedTensor):
            return SimulatedTensor.over(made, index)
        return made

    with _DisableTorchDispatch():
        return tree_map(ours, func(*args, **kwargs))


class _Launch:
    """One operator with its arguments as they are now: aliases of the tensors, copies of numbers."""

    def __init__(
        self, world: SimulatedCuda, schema: _OperatorSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._world, self._schema, self._args, self._kwargs = world, schema, args, kwargs
        leaves, self._spec = tree_flatten((args, kwargs))
        ours = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
        self.index: Final = ours[0].cuda_index
        self.lane: Final = world.current_stream(self.index).lane
        if torch.is_grad_enabled() and any(t.requires_grad for t in ours):
            world.autograd_lanes.add(self.lane)
        self._blocks: list[Allocation] = []
        self._aliases: list[Any] = [self._alias(leaf) for leaf in leaves]

    def _alias(self, leaf: Any) -> Any:
        if isinstance(leaf, SimulatedTensor):
            if leaf.cuda_index != self.index:
                raise _elsewhere(self.index, leaf)
            plain, block = self._world.memory.alias(leaf)
            if (
                block is not None
                and not self._schema.name.startswith("new_")
                and not self._schema.name.endswith("_like")
            ):
                self._blocks.append(block)  # the others ask for the shape alone
            return plain
        if isinstance(leaf, torch.Tensor):
            # Formulas of autograd in C++ make tensors where they think they are: on the host.
            allowed = self._schema.name in _TAKE_HOST_INDICES or _current_graph_task_id() != -1
            if leaf.dim() and not allowed:
                raise _elsewhere(self.index, leaf)
            return leaf.detach().clone()
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def wait(self, func: Any, kind: str | None) -> Any:
        """Let the host wait for the stream, and run at once."""
        if kind is None:
            self._world.fallbacks[self._schema.name] += 1
            if not self.lane.mark().wait(self._world.patience):
                raise RuntimeError(f"{self.lane} did not end within {self._world.patience} s: is it held?")
        else:
            self._world.wait(self.lane.mark(), self.index, kind)
        args, kwargs = tree_unflatten(self._aliases, self._spec)
        results = func(*args, **kwargs)
        return self._returned(results, lambda made: self._new(made, made) if isinstance(made, torch.Tensor) else made)

    def queue(self, func: Any) -> Any:
        """Queue it, and return the tensors that it will write."""
        aliases, spec, keys = self._aliases, self._spec, self._schema.returns
        shapes: Any = None if len(keys) == 1 else [None] * len(keys)
        if None in keys:
            try:
                shapes = self._shapes(func)
            except NotImplementedError:
                return self.wait(func, "implicit" if self._schema.name == "index" else None)
        written: list[torch.Tensor | None] = []

        def promised(shape: object) -> object:
            if not isinstance(shape, torch.Tensor):
                written.append(None)
                return shape
            made = self._new(shape, None)
            written.append(self._world.memory.alias(made)[0])
            return made

        returned = self._returned(shapes, promised)

        def run() -> None:
            args, kwargs = tree_unflatten(aliases, spec)
            made = _each(func(*args, **kwargs), keys)
            new = [result for key, result in zip(keys, made, strict=True) if key is None]
            for into, result in zip(written, tree_leaves(new), strict=True):
                if into is not None and result is not None:  # a gradient that was not requested is not made
                    _deliver(into, result)

        launch(self._world, self.lane, self._schema.name, run, self._blocks)
        return returned

    def _shapes(self, func: Any) -> Any:
        """Return tensors like the results, which do not depend on the data."""
        key = (func, self._spec, *map(_key, self._aliases))
        if (shapes := _shapes.get(key)) is None:
            twin = _example if self._schema.name in _BY_EXAMPLE else _shape
            args, kwargs = tree_unflatten([twin(leaf) for leaf in self._aliases], self._spec)
            shapes = func(*args, **kwargs)
            if len(_shapes) >= _SHAPES:
                _shapes.clear()
            _shapes[key] = shapes = tree_map(_shape, shapes)
        return shapes

    def _new(self, like: torch.Tensor, data: torch.Tensor | None) -> SimulatedTensor:
        plain = self._world.memory.allocate(self.lane, like.size(), like.stride(), like.dtype)
        if data is not None:
            plain.copy_(data)
        return SimulatedTensor.over(plain, self.index)

    def _returned(self, results: Any, new: Callable[[object], object]) -> Any:
        """Return the arguments that are results, and `new` of the results that are new."""
        keys = self._schema.returns

        def one(key: int | str | None, result: object) -> object:
            if key is None:
                return tree_map(new, result)
            return self._args[key] if isinstance(key, int) else self._kwargs[key]

        found = tuple(one(key, result) for key, result in zip(keys, _each(results, keys), strict=True))
        return found[0] if len(keys) == 1 else found if keys else None


def _each(results: Any, keys: Sequence[object]) -> Sequence[Any]:
    """Return the results as a sequence with one for each that the schema names."""
    return () if not keys else (results,) if len(keys) == 1 else results


def _key(leaf: Any) -> object:
    """Return what the shape and type of a result depend on."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.size(), leaf.stride(), leaf.dtype, leaf.is_conj(), leaf.is_neg())
    return (type(leaf), leaf)


def _shape(leaf: Any) -> Any:
    """Return a tensor's twin without data."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return seen_as(leaf, made)


def _example(leaf: Any) -> Any:
    return torch.ones_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _deliver(into: torch.Tensor, result: torch.Tensor) -> None:
    if result.shape != into.shape or result.dtype != into.dtype:
        raise NotImplementedError(
            f"simulated_cuda expected {into.dtype} of {tuple(into.shape)}, "
            f"but the CPU's kernel made {result.dtype} of {tuple(result.shape)}"
        )
    into.copy_(result)


def _elsewhere(index: int, other: torch.Tensor) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:{index} and {other.device}!"
    )

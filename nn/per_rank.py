"""A net's module in two parts: tensors that ranks share, and tensors that each rank keeps for itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from aiodist.checkpoints.saving import load_exactly

_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of torch's DistributedDataParallel with names


class Shared:
    """The parameters and buffers of a module that ranks share, by name, since a buffer may be replaced."""

    def __init__(self, module: nn.Module, given: Any = None, divided: Iterable[Tensor] = ()) -> None:
        """Exclude the `given` submodules, parameters and buffers of `module`, or their names.

        The names in `module._ddp_params_and_buffers_to_ignore` are excluded too. Raises TypeError and ValueError for
        any other `given`; ValueError for `divided` parameters, and for a submodule with a tensor that the rest of the
        module uses too.
        """
        self.module = module
        self._names: set[str] = set()
        """All names of excluded parameters and buffers."""
        self._modules: list[str] = []
        """Names of excluded submodules."""
        self._aliases: dict[int, list[str]] = defaultdict(list)
        for name, t in _tensors(module):
            self._aliases[id(t)].append(name)
        for each in as_list(given):
            self._keep(each)
        self._check_whole()
        ignored = set(getattr(module, _IGNORED, ()))
        for aliases in self._aliases.values():
            if not ignored.isdisjoint(aliases):
                self._names.update(aliases)
        self.kept = [p for name, p in module.named_parameters() if name in self._names]
        """The parameters of the module that each rank keeps."""
        for p in divided:
            if not self._names.isdisjoint(self._aliases[id(p)]):
                name = self._aliases[id(p)][0]
                raise ValueError(f"per_rank has {name!r}, of a layer that is divided among ranks: expected others")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for pair in self.module.named_parameters() if pair[0] not in self._names)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in self.module.named_buffers() if pair[0] not in self._names)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (p for _, p in self.named_parameters())

    def keeps(self, key: str) -> bool:
        """Return True if each rank keeps the value with this key in a state dict of the module."""
        return key in self._names or any(_within(key, name) for name in self._modules)

    def own_parameters(self, given: Any) -> tuple[Tensor, ...]:
        """Return the parameters of a later `per_rank` setting, and all that each rank keeps of the module.

        Raises ValueError for parameters of the module that are reduced; TypeError as `as_list`.
        """
        found: dict[int, Tensor] = {id(p): p for p in self.kept}
        reduced = {id(p): name for name, p in self.named_parameters()}
        named = dict(_tensors(self.module))
        for each in as_list(given):
            if isinstance(each, str):
                tensors = [t for name, t in named.items() if _within(name, each)]
            else:
                tensors = list(each.parameters()) if isinstance(each, nn.Module) else [each]
            for t in tensors:
                if id(t) in reduced:
                    raise ValueError(
                        f"per_rank has {reduced[id(t)]!r}, a parameter of the net, which reduces it: expected "
                        "parameters of others; give `create` the parameters of its module that each rank keeps"
                    )
                if id(t) not in self._aliases:
                    found[id(t)] = t
        return tuple(found.values())

    def _keep(self, each: nn.Module | Tensor | str) -> None:
        modules = [(name, m) for name, m in self.module.named_modules(remove_duplicate=False)]
        if isinstance(each, str):
            whole = next((m for name, m in modules if name == each), None)
        else:
            whole = each if isinstance(each, nn.Module) else None
        if whole is not None:
            names = [name for name, m in modules if m is whole]
            self._modules += names
            self._names.update(name for name, _ in _tensors(self.module) if any(_within(name, of) for of in names))
        elif isinstance(each, Tensor):
            self._names.update(self._aliases.get(id(each), ()))
        elif isinstance(each, str):
            aliases = next((known for known in self._aliases.values() if each in known), None)
            if aliases is None:
                kind = type(self.module).__name__
                raise ValueError(f"per_rank has {each!r}: expected a module, a parameter or a buffer of the {kind}")
            self._names.update(aliases)

    def _check_whole(self) -> None:
        for aliases in self._aliases.values():
            kept = [name for name in aliases if name in self._names]
            if kept and len(kept) < len(aliases):
                other = next(name for name in aliases if name not in self._names)
                raise ValueError(
                    f"per_rank has {kept[0]!r}, which the net has as {other!r} too: name the parameter itself, and "
                    "each rank keeps both, or give each a parameter of its own"
                )


class SharedState:
    """The state of an optimizer of torch, without that of parameters that each rank keeps for itself."""

    def __init__(self, optimizer: Optimizer, own: Container[int]) -> None:
        """`own` are the ids of the excluded parameters."""
        self._optimizer = optimizer
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        """Return a state in torch's form, with numbers of the shared parameters in their order."""
        state = self._optimizer.state_dict()
        numbers = self._numbers(state)
        place = {number: i for i, number in enumerate(chain.from_iterable(numbers))}
        groups = [
            {**group, "params": [place[number] for number in of_group]}
            for group, of_group in zip(state["param_groups"], numbers, strict=True)
            if of_group
        ]
        return {"state": {place[n]: each for n, each in state["state"].items() if n in place}, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load `state` for the shared parameters only. Raises ValueError for other groups."""
        mine = self._optimizer.state_dict()
        numbers = self._numbers(mine)
        sizes = [len(of_group) for of_group in numbers if of_group]
        if (theirs := [len(group["params"]) for group in state["param_groups"]]) != sizes:
            raise ValueError(f"the state has groups of {theirs} parameters that ranks share: expected {sizes}")
        shared = list(chain.from_iterable(numbers))
        values = {number: each for number, each in mine["state"].items() if number not in set(shared)}
        values |= {shared[i]: each for i, each in state["state"].items()}
        given = iter(state["param_groups"])
        kept = ("params", "param_names")
        groups = [
            {**next(given), **{key: group[key] for key in kept if key in group}} if of_group else group
            for group, of_group in zip(mine["param_groups"], numbers, strict=True)
        ]
        load_exactly(self._optimizer, {**mine, "state": values, "param_groups": groups})

    def _numbers(self, state: Mapping[str, Any]) -> list[list[int]]:
        """Return the numbers of the shared parameters of each group of `state`."""
        groups = zip(state["param_groups"], self._optimizer.param_groups, strict=True)
        return [
            [number for number, p in zip(packed["params"], group["params"], strict=True) if id(p) not in self._own]
            for packed, group in groups
        ]


def as_list(given: Any) -> list[nn.Module | Tensor | str]:
    """Return the `given` value of `per_rank` as a list; raise TypeError for a wrong type."""
    one = isinstance(given, (Tensor, nn.Module, str))
    found = [] if given is None else [given] if one else list(given)
    if wrong := [type(each).__name__ for each in found if not isinstance(each, (Tensor, nn.Module, str))]:
        raise TypeError(
            f"per_rank has {', '.join(sorted(set(wrong)))}: expected parameters, as `head.parameters()`, modules, or "
            "names in the net's module"
        )
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return all parameters and buffers, with all their names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


def _within(name: str, module: str) -> bool:
    """Return True if `name` is that of the module, or of a module or tensor in it."""
    return not module or name == module or name.startswith(f"{module}.")

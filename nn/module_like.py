"""The part of `torch.nn.Module` that helpers use, for a class that wraps a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar, cast

from torch import nn

from aiodist.nn.binding import Binding
from aiodist.nn.per_rank import Shared
from aiodist.nn.steps import hash_of

P = ParamSpec("P")
T = TypeVar("T")

RENAMED = {
    "run": "net.submit(fn)",
    "settings": "net.configure(...)",
    "gradients": "net.backward_iter(loss)",
    "steps": "net.steps_done",
    "open": "net.closed, which is True once the net is closed",
}
"""Replacements of old names of a net's methods and properties."""


def _of_module(method: Callable[Concatenate[nn.Module, P], T]) -> Callable[Concatenate[ModuleLike, P], T]:
    """Return a method that calls the method of the module."""

    def call(self: ModuleLike, *args: P.args, **kwargs: P.kwargs) -> T:
        found: T = getattr(self.module, method.__name__)(*args, **kwargs)
        return found

    return update_wrapper(cast("Callable[Concatenate[ModuleLike, P], T]", call), method)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(self: ModuleLike, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__}.{name}: its buckets have the devices and dtypes of the parameters: "
            "move it before create()"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Raise RuntimeError: move or cast the module before `create`."
    return refuse


class ModuleLike:
    """The methods of `torch.nn.Module` that read the module or switch its modes; names have no prefix."""

    _binding: Binding
    checkpoint_kind = "module"
    """A net and a plain module load each other's checkpoints."""

    @property
    def module(self) -> nn.Module:
        """The module that `create` was given."""
        return self._binding.shared.module

    @property
    def shared(self) -> Shared:
        """The part of the module that all ranks have in common: parameters and buffers that are not `per_rank`."""
        return self._binding.shared

    @property
    def training(self) -> bool:
        """True if dropout, batch norm and similar modules are in training mode."""
        return self.module.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for these arguments, computed on the calling thread."""
        if not self._binding.compute.is_current():
            self._binding.reducer.hooks.watch()
        return self._binding.shared.module(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module, with the names of the plain module.

        As in torch it holds the parameters themselves, also this rank's `per_rank` ones, and later steps change them.
        `aiodist.save` saves a checkpoint in the background. Raises `RuntimeError` while updates are pending: `await
        opt.flush()` first.

        ```python
        import copy

        state = await net.submit(lambda: copy.deepcopy(net.state_dict()))  # a copy between two steps
        ```
        """
        self._binding.check_updated()
        return self.module.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load `state` into the module, on this rank; every rank must load the same state.

        If ranks load different states, the next step or backward raises `MismatchError` on all of them. After steps
        that only some ranks made, loading the same state on all ranks makes the next step work again.

        Args:
            state: A state dict of the net or of the plain module.
            strict: Raise `RuntimeError` if names are missing or unknown, as in torch.

        Raises:
            RuntimeError: While updates are pending, or a step or backward is in flight.

        ```python
        state = torch.nn.Linear(8, 1).state_dict()
        await net.submit(net.load_state_dict, state)  # after all steps in flight
        ```

        """
        self._binding.check_loads()
        self.module.load_state_dict(state, strict=strict)
        reducer = self._binding.reducer
        reducer.steps.alike(loaded=hash_of([slot.parameter for slot in reducer.slots]))

    parameters = _of_module(nn.Module.parameters)
    named_parameters = _of_module(nn.Module.named_parameters)
    buffers = _of_module(nn.Module.buffers)
    named_buffers = _of_module(nn.Module.named_buffers)
    modules = _of_module(nn.Module.modules)
    named_modules = _of_module(nn.Module.named_modules)
    children = _of_module(nn.Module.children)
    named_children = _of_module(nn.Module.named_children)
    get_parameter = _of_module(nn.Module.get_parameter)
    get_buffer = _of_module(nn.Module.get_buffer)
    get_submodule = _of_module(nn.Module.get_submodule)
    zero_grad = _of_module(nn.Module.zero_grad)

    to, to_empty, cpu, cuda = _refused("to"), _refused("to_empty"), _refused("cpu"), _refused("cuda")
    type, half, float = _refused("type"), _refused("half"), _refused("float")
    double, bfloat16 = _refused("double"), _refused("bfloat16")

    def train(self, mode: bool = True) -> Self:
        """Switch dropout, batch norm and similar modules to training mode, or with False to evaluation mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Switch dropout, batch norm and similar modules to evaluation mode."""
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Unfreeze all parameters, or freeze them; between two steps, on all ranks."""
        self.module.requires_grad_(requires_grad)
        return self

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if (new := RENAMED.get(name)) is not None:
                text += f": use {new}"
            elif not name.startswith("__"):  # Python, copy and pickle ask for such names
                text += (
                    f": it is no nn.Module. Expected `net.module.{name}`, or `net.module` where a function needs a "
                    "module, as in `functional_call(net.module, parameters, x)`"
                )
            raise AttributeError(text, name=name, obj=self)

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Call `fn` with every module, for example to initialise it; on all ranks."""
        self.module.apply(fn)
        return self

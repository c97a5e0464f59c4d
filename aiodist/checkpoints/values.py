"""Values as JSON and tensors, and back, without pickle.

docs/design/checkpoints.md has the form of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Json = Any

_EXACT = 1 << 53
_DEEPEST = 60


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` … `start + tensor.numel()` of a tensor of `shape`, made flat: what one rank owns of it."""

    tensor: Tensor
    start: int
    shape: tuple[int, ...]
    dims: tuple[int, ...] | None = None
    """The state has the tensor with its dimensions permuted so; None is as they are."""
    number: bool = False
    """True if the state has a plain number, and `tensor` its only element."""


def encode(value: object, path: str, tensors: dict[str, Any], depth: int = 0) -> Json:
    """Return `value` as JSON, and put its tensors and pieces into `tensors` by their paths below `path`.

    Raises `TypeError`, with the path, for a value that is neither JSON nor a dense tensor.
    """
    if value is None or type(value) in (bool, str):
        return _checked_text(value, path) if isinstance(value, str) else value
    if type(value) is int:
        return value if abs(value) <= _EXACT else {"int": hex(value)}
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if depth > _DEEPEST:
        raise TypeError(f"{path}: nested more than {_DEEPEST} deep")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        each = [encode(v, f"{path}/{i}", tensors, depth + 1) for i, v in enumerate(value)]
        return each if type(value) is list else {"tuple": each}
    if isinstance(value, dict):
        return _encoded_dict(value, path, tensors, depth)
    if isinstance(value, Tensor):
        return {"tensor": _kept(_checked_tensor(value, path), path, tensors)}
    if isinstance(value, Piece):
        return _encoded_piece(value, path, tensors)
    if type(value) is np.ndarray:
        return {"array": _kept(_tensor_of(value, path), path, tensors)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(
        f"{path} is {kind}: expected None, bool, int, float, str, tensors, arrays, and lists, tuples and dicts of them"
    )


def _encoded_piece(value: Piece, path: str, tensors: dict[str, Any]) -> Json:
    name = _kept(value, path, tensors)
    if value.dims is not None:
        return {"permuted": [name, list(value.dims)]}
    return {"number" if value.number else "tensor": name}


def _encoded_dict(value: Mapping[Any, object], path: str, tensors: dict[str, Any], depth: int) -> Json:
    if all(type(key) is str for key in value):
        return {
            "map": {
                _checked_text(key, path): encode(v, f"{path}/{key}", tensors, depth + 1) for key, v in value.items()
            }
        }
    pairs = []
    for key, v in value.items():
        found: dict[str, Tensor] = {}
        pair = [encode(key, f"{path}/key", found, depth + 1), encode(v, f"{path}/{key}", tensors, depth + 1)]
        if found:
            raise TypeError(f"{path} has a tensor for a key")
        pairs.append(pair)
    return {"dict": pairs}


def _checked_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"{path}: {text!r} is no text that UTF-8 can say") from error
    return text


def _checked_tensor(t: Tensor, path: str) -> Tensor:
    of_others = hasattr(t, "__tensor_flatten__") or t.is_nested or t.is_quantized or t.is_meta
    if of_others or t.layout is not torch.strided:
        raise TypeError(f"{path} is {type(t).__name__}, {t.layout} on {t.device}: expected a dense tensor")
    return t.detach()


def _tensor_of(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:  # the latter for another order of bytes
        raise TypeError(f"{path} is an array of {array.dtype}: expected a dtype that torch has") from error


def _kept(t: Tensor | Piece, path: str, tensors: dict[str, Any]) -> str:
    name = path
    while name in tensors:  # {"a/b": …, "a": {"b": …}}
        name += "'"
    tensors[name] = t
    return name


def decode(said: Json, tensor: Callable[[str], Any]) -> Any:  # noqa: ANN401
    """Return the value that `encode` has said so; `tensor` finds tensors.

    Raises ValueError, TypeError, LookupError or AttributeError for other JSON.
    """
    if said is None or isinstance(said, bool | int | float | str):
        return said
    if isinstance(said, list):
        return [decode(each, tensor) for each in said]
    ((tag, content),) = said.items()
    return _DECODERS[tag](content, tensor)


_Find = Callable[[str], Any]


def _permuted(content: list[Any], tensor: _Find) -> Any:  # noqa: ANN401
    name, dims = content
    t = tensor(name)
    if sorted(dims) != list(range(len(t.shape))):
        raise ValueError(f"a tensor of {len(t.shape)} dimensions permuted by {dims!r:.40}")
    return t.permute(dims)


_DECODERS: dict[str, Callable[[Any, _Find], Any]] = {
    "map": lambda content, tensor: {key: decode(v, tensor) for key, v in content.items()},
    "dict": lambda content, tensor: {decode(key, tensor): decode(v, tensor) for key, v in content},
    "tuple": lambda content, tensor: tuple(decode(v, tensor) for v in content),
    "float": lambda content, _: float(content),
    "int": lambda content, _: int(content, 16),
    "tensor": lambda content, tensor: tensor(content),
    "array": lambda content, tensor: tensor(content).numpy(),
    "number": lambda content, tensor: tensor(content).item(),
    "permuted": _permuted,
}

"""Every call of aiodist that makes a tensor names the device; without it, the tensor is on the user's default device.

`torch.set_default_device("cuda")` is usual, and the core would end the process if it took such memory for the host's.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAKERS = frozenset(
    (
        *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones"),
        *("rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices"),
        *("triu_indices", "zeros"),
    )
)
"""The functions of torch that take the default device."""


def silent(source: str) -> list[str]:
    """Return the calls that make a tensor and do not say where."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [ast.unparse(call) for call in calls if _makes(call.func) and not _says(call)]


def _makes(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch" and function.attr in MAKERS


def _says(call: ast.Call) -> bool:
    return any(keyword.arg in ("device", None) for keyword in call.keywords)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("package", ["aiodist", "handles", "streams", "nn"])
def test_every_tensor_says_on_which_device_it_lies(package: str) -> None:
    found = {str(path): calls for path in (ROOT / package).rglob("*.py") if (calls := silent(path.read_text()))}
    assert not found


def test_a_tensor_that_does_not_is_found() -> None:
    assert silent("x = torch.empty(3)\ny = torch.zeros(3, device='cpu')\nz = torch.ones(3, **options)") == [
        "torch.empty(3)"
    ]

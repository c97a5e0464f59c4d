"""CUDA devices of a host that can read and write each other's memory."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch


def peers_here() -> list[list[int]]:
    """Return, for each visible device, the numbers of the devices with peer access, without opening a device.

    Before torch uses a device the driver is queried, since torch's query would initialise CUDA. With one visible device
    there is no query.
    """
    devices = range(torch.cuda.device_count())
    reaches = torch.cuda.can_device_access_peer if torch.cuda.is_initialized() else _reaches
    return [[peer for peer in devices if peer != device and reaches(device, peer)] for device in devices]


@cache
def driver() -> Any:  # noqa: ANN401
    """Return the initialised library of the driver, or None if there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if cuda.cuInit(0) else cuda


def _reaches(device: int, peer: int) -> bool:
    cuda, reaches = driver(), ctypes.c_int(0)
    if cuda is None:
        return False
    handles = ctypes.c_int(), ctypes.c_int()
    failures = [cuda.cuDeviceGet(ctypes.byref(handle), n) for handle, n in zip(handles, (device, peer), strict=True)]
    return not any(failures) and not cuda.cuDeviceCanAccessPeer(ctypes.byref(reaches), *handles) and reaches.value > 0

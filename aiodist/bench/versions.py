"""What the libraries are that ours is measured beside: their versions, and what carries their bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch


def described_mpi(said: str) -> str:
    """Return mpi4py, the library that it runs on, from what that says of itself, and the library's transports."""
    lines = [line.strip() for line in said.strip("\0").splitlines()]
    words = lines[0].replace(",", "").split()
    device = next((" ".join(line.split()[2:]) for line in lines if line.startswith("MPICH Device:")), None)
    if device is not None:
        name, carried = f"MPICH {words[-1]}", f"device {device}"
    elif lines[0].startswith("Open MPI"):
        name, carried = f"Open MPI {words[2].removeprefix('v')}", _open_mpi_transports()
    else:
        name, carried = lines[0], "transports unknown"
    return f"mpi4py {metadata.version('mpi4py')} over {name} ({carried})"


def _open_mpi_transports() -> str:
    tool = shutil.which(Path(sys.executable).with_name("ompi_info")) or shutil.which("ompi_info")
    if tool is None:
        return "transports unknown: no ompi_info"
    done = subprocess.run([tool, "--parsable"], capture_output=True, text=True, timeout=30, check=False)
    return transports(done.stdout)


def transports(told: str) -> str:
    r"""Return the components of Open MPI that can carry bytes, from what `ompi_info --parsable` prints.

    `btl` carry messages; `smsc` copies long ones from process to process, and without it they pass through slots.

    >>> transports("mca:btl:sm:version:api\nmca:btl:tcp:version:api\nmca:smsc:cma:version:api")
    'btl sm tcp, smsc cma'
    """
    found: dict[str, set[str]] = {"btl": set(), "smsc": set()}
    for line in told.splitlines():
        match line.split(":"):
            case ["mca", ("btl" | "smsc") as framework, component, "version", *_]:
                found[framework].add(component)
    return ", ".join(f"{name} {' '.join(sorted(parts)) or 'none'}" for name, parts in found.items())


def described_gloo() -> str:
    """Return gloo, which torch brings and which has no number of its own."""
    return f"gloo of torch {torch.__version__} (TCP)"

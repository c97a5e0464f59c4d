"""Collectives of the ranks of a host, in C (core/); what Python finds here, where that is not built, says so.

The extension beside this file, `_core.abi3.so`, is what is imported: Python looks for extensions first.
"""

from __future__ import annotations

import platform
import sys

from aiodist.errors import BackendUnavailable

if sys.platform == "linux":
    raise BackendUnavailable(
        f"aiodist._core is not built for {platform.python_implementation()} {platform.python_version()} on "
        f"{platform.machine()}: install aiodist with pip, or say `make core` in a checkout",
    )
raise BackendUnavailable(f"aiodist is for Linux only, and this is {platform.system()}")

"""Stands for the compiled core (core/) if that is not built, and says how to build it.

Otherwise Python imports the extension `_core.abi3.so` of the same folder, since it looks for extensions first.
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

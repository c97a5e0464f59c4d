"""Start-up of the ranks of `aiodist run --as`, and of their children."""

import sys
from os.path import dirname

if __name__ == "sitecustomize":
    sys.path.remove(dirname(__file__))
    this = sys.modules.pop(__name__)
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401 - that of the environment
    except ModuleNotFoundError as missing:
        if missing.name != __name__:
            raise
        sys.modules[__name__] = this
    finally:
        from aiodist.alias.startup import install

        install()

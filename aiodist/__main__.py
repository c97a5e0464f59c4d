"""The command `aiodist`, and `python -m aiodist`: Ctrl-C is no traceback, in the midst of imports either."""

import sys


def main() -> int:
    """Run the command line; return its exit code, 130 where it was interrupted."""
    try:
        from aiodist.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("aiodist: interrupted", file=sys.stderr)  # noqa: T201
        return 130


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the working directory, where a file `select.py` would be taken for the standard module
    sys.exit(main())

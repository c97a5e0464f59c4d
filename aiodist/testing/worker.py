"""One rank of a job that runs tests: `python -m aiodist.testing.worker FOLDER`, started by `aiodist.testing.jobs`."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from aiodist.env import Environment


def main() -> int:
    """Run pytest as the folder says; results go to a file there. A failed test is no failure of the job."""
    # When one rank fails, the launcher ends the others: first they shall write down how it went for them.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    folder = Path(sys.argv[1])
    arguments = json.loads((folder / "arguments").read_text())
    # Where all share one, each removes what earlier runs left there, and stumbles over the others.
    code = pytest.main([*arguments, f"--basetemp={folder / f'tmp-{Environment.read().rank}'}"])
    fine = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
    return 0 if code in fine else int(code)


if __name__ == "__main__":
    sys.exit(main())

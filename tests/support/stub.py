"""`stub.py SOCKET PROGRAM [ARGS]` in place of `python PROGRAM [ARGS]`: the nursery forks the program (see there).

It says how the program ended as its own end, and where LIFECYCLE_REPORT names a folder also in FOLDER/RANK.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "AIODIST_RANK")


def main() -> int:
    environ = dict(os.environ)
    fds = [0, 1, 2]
    if "PMI_FD" in environ:  # MPICH's ranks speak with their mpirun over an open file
        fds.append(int(environ["PMI_FD"]))
    rank = next((environ[name] for name in _RANKS if name in environ), None)
    folder = environ.get("LIFECYCLE_REPORT")
    request = {
        "argv": sys.argv[2:],
        "environ": environ,
        "cwd": os.getcwd(),
        "fds": fds,
        "report": f"{folder}/{rank}" if folder and rank is not None else None,
    }
    text = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [b"%d\n" % len(text)], fds)
    connection.sendall(text)
    answers = connection.makefile("rb")
    child = int(answers.readline())
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda signum, _: os.kill(child, signum))
    code = int(answers.readline() or b"-9")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code not in (-9, -19) else None
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    os._exit(main())

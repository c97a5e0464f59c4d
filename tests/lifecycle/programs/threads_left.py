"""Says, as the last thing that a program may do, which threads are left; for an interpreter of its own."""

import atexit
import sys
import threading


def say() -> None:
    names = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    sys.stdout.write(f"left: {names}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    atexit.register(say)  # before aiodist is imported: so it is called after all that aiodist has registered
    import aiodist

    with aiodist.start() as coll:
        coll.barrier().wait()
        if coll.rank == 1:
            raise ValueError("rank 1 has had enough")
        coll.recv(src=1).wait()

"""The engine as a process of its own: `python -m inferd.engine_process FD`, started by the front.

FD is an inherited end of a socket pair; the front's first message on it is the Setup. SIGTERM is an orderly exit from
the first moment on. Exit codes: 0 after an orderly stop, 2 if the engine cannot start with what it was told (Failed for
request 0 has said why), 75 if it needs another PID than it has (see inferd.device), 76 if its GPU takes
no more work from it, 1 for a bug.
"""

from __future__ import annotations

import socket
import sys

from pagepool.early import quit_on_sigterm


def main(fd: int) -> int:
    """Serve the front at the other end of a socket; the exit code."""
    quit_on_sigterm()
    from inferd import engine_setup  # takes long, and SIGTERM is to be orderly meanwhile
    from inferd.device import EXIT_RESPAWN, RespawnError

    front = socket.socket(fileno=fd)
    front.set_inheritable(False)
    try:
        return engine_setup.serve(front)
    except RespawnError:
        return EXIT_RESPAWN


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

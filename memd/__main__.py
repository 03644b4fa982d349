"""`memd`, and `python -m memd`."""

from __future__ import annotations

import sys

from pagepool.early import quit_on_sigterm


def main() -> int:
    """The console script."""
    quit_on_sigterm()
    from memd import daemon  # takes long, and SIGTERM is to be orderly meanwhile

    return daemon.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

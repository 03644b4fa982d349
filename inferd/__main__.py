"""`inferd`, and `python -m inferd`."""

from __future__ import annotations

import sys

from pagepool.early import quit_on_sigterm


def main() -> int:
    """The console script."""
    quit_on_sigterm()
    try:
        from inferd import front  # takes long, and SIGTERM is to be orderly meanwhile
    except ModuleNotFoundError as error:
        sys.stderr.write(f"inferd: {error.name} is not installed; run `pip install 'pagepool[inferd]'`\n")
        return 2
    return front.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())

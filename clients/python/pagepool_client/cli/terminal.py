"""What the command says, and how: text on standard output, everything about it on standard error."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from typing import TextIO

from pagepool.errors import Code, PagepoolError

_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}
_SPINNER = itertools.cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
_CLEAR_LINE = "\r\x1b[2K"
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def exit_code(error: PagepoolError) -> int:
    """2 for what the user can mend in the command line, 1 for the rest."""
    return EXIT_USAGE if error.code is Code.INVALID_ARGUMENT else EXIT_FAILED


class Terminal:
    """Standard output and standard error of one run. Styles appear only on a terminal, and never with NO_COLOR."""

    def __init__(self, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
        self._out, self._err = out, err
        self._status = ""
        self._shown = False

    @property
    def width(self) -> int:
        """Columns of the terminal; 80 where there is none."""
        return shutil.get_terminal_size((80, 24)).columns

    def styled(self, text: str, *styles: str, to_err: bool = False) -> str:
        """The text in the styles that the stream can show."""
        stream = self._err if to_err else self._out
        if not stream.isatty() or os.environ.get("NO_COLOR"):
            return text
        return "".join(f"\x1b[{_STYLES[style]}m" for style in styles) + text + "\x1b[0m"

    def write(self, text: str) -> None:
        """Text on standard output, at once."""
        self.clear_status()
        self._out.write(text)
        self._out.flush()

    def line(self, text: str = "") -> None:
        """A line on standard output."""
        self.write(text + "\n")

    def note(self, text: str) -> None:
        """A line about the output, on standard error."""
        self.clear_status()
        self._err.write(self.styled(text, "dim", to_err=True) + "\n")
        self._err.flush()

    def error(self, text: str) -> None:
        """A line that says what went wrong."""
        self.clear_status()
        self._err.write(f"{self.styled('pagepool:', 'red', 'bold', to_err=True)} {text}\n")
        self._err.flush()

    def status(self, text: str, elapsed_s: float | None = None) -> None:
        """What is going on now, and since when.

        One line that is written over on a terminal; elsewhere a line of its own whenever the text changes.
        """
        if self._err.isatty():
            since = "" if elapsed_s is None else f" ({elapsed_s:.0f} s)"
            shown = f"{next(_SPINNER)} {text}"[: self.width - len(since) - 1] + since
            self._err.write(_CLEAR_LINE + shown)
            self._shown = True
        elif text != self._status:
            self._err.write(text + "\n")
        self._status = text
        self._err.flush()

    def clear_status(self) -> None:
        """Take the status line away."""
        if self._shown:
            self._err.write(_CLEAR_LINE)
            self._err.flush()
            self._shown = False

    def new_page(self) -> None:
        """Begin at the top of a terminal again; elsewhere, leave a line free."""
        self._out.write("\x1b[H\x1b[2J" if self._out.isatty() else "\n")

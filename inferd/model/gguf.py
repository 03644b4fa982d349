"""Converts a GGUF file into a folder that transformers loads quickly; once for each content of the file."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from inferd.model.digest import file_digest
from inferd.model.refusal import refuse

CONVERSION_VERSION = 1
"""Part of the cache key; raise it when the conversion's result changes."""

_MAGIC = b"GGUF"
_PERCENT = re.compile(r"(\w[^:]*):\s+(\d+)%\|")


def converted(spec: str, gguf: Path, cache: Path, tell: Callable[[str], None]) -> Path:
    """The folder, below `cache`, that a GGUF file was converted to; converts it first if need be.

    The key is the file's content, so a file replaced under its name is converted anew. Several processes may ask at
    once: one converts, the others wait. Raises PagepoolError if it is no GGUF file, or none that transformers can read.
    """
    with gguf.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise refuse(spec, f"{gguf.name} is not a GGUF file", "name a GGUF file, or a folder with a model")
    models = cache / "models"
    models.mkdir(parents=True, exist_ok=True)
    key = f"{gguf.stem}-{file_digest(gguf, cache).hex()[:16]}-v{CONVERSION_VERSION}"
    target = models / key
    if target.is_dir():
        return target
    with (models / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            draft = models / f"{key}.draft"
            shutil.rmtree(draft, ignore_errors=True)  # of a conversion that was killed
            _convert(spec, gguf, draft, lock.fileno(), tell)
            draft.rename(target)
    return target


def _convert(spec: str, gguf: Path, draft: Path, lock: int, tell: Callable[[str], None]) -> None:
    """Convert in a process of its own, which gives its memory back, and which holds the lock even if this one dies."""
    tell(f"converting {gguf.name}, once")
    command = [sys.executable, "-m", "inferd.model.gguf_conversion", str(gguf), str(draft)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[lock]) as child:  # noqa: S603 (our own module)
        assert child.stdout is not None
        last = _follow(gguf.name, child.stdout, tell)
    if child.returncode:
        shutil.rmtree(draft, ignore_errors=True)
        why = f"its conversion ended with {child.returncode}: {last}"
        raise refuse(spec, why, "choose a GGUF file of an architecture that transformers reads, or the original model")


def _follow(name: str, output: IO[bytes], tell: Callable[[str], None]) -> str:
    """Pass on every tenth of each progress bar; the last line that is none."""
    told, last = "", ""
    for line in _lines(output):
        bar = _PERCENT.search(line)
        if bar is None:
            last = line.strip() or last
            continue
        now = f"{name}: {bar[1].rstrip('.').lower()}, {int(bar[2]) // 10 * 10} %"
        if now != told:
            tell(now)
        told = now
    return last


def _lines(output: IO[bytes]) -> Iterator[str]:
    """Lines, and the states of progress bars, as they come."""
    pending: deque[str] = deque([""])
    while chunk := output.read1(1 << 16):  # type: ignore[attr-defined]  # a pipe's reader is buffered and has it
        parts = re.split(r"[\r\n]", pending.pop() + chunk.decode(errors="replace"))
        yield from parts[:-1]
        pending.append(parts[-1])
    yield pending.pop()

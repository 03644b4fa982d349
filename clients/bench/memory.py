"""Resident memory as the kernel counts it: PSS, in which a page that several processes map counts once in all."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PAGE_BYTES = 4096
"""What an entry of /proc/PID/pagemap stands for on the machines that this is run on."""
POOL_FILES = f"pagepool-{os.getuid()}-"
"""What the names of the shared memory that holds a pool have in common."""
_ENTRY_BYTES, _PRESENT_BIT = 8, 63


def proportional_kb(smaps: str, without: str = "") -> int:
    """The sum of PSS in the text of /proc/PID/smaps; mappings of files whose path contains `without` are left out."""
    total, counts = 0, False
    for line in smaps.splitlines():
        head = line.split(maxsplit=5)
        if not head[0].endswith(":"):
            counts = not without or len(head) < 6 or without not in head[5]
        elif counts and head[0] == "Pss:":
            total += int(head[1])
    return total


def proportional_mb(pids: Iterable[int], without: str = "") -> float:
    """PSS of all these processes together, in MB; proportional_kb."""
    return sum(proportional_kb(Path(f"/proc/{pid}/smaps").read_text(), without) for pid in pids) / 1024


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """`root` and every process below it, given the parent of each process."""
    found = [root]
    for pid in found:  # grows while it is gone through
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def parent_of(stat: str) -> int:
    """The parent in the text of /proc/PID/stat, whose second field is a name that may hold anything."""
    return int(stat.rpartition(")")[2].split()[1])


def tree(root: int) -> list[int]:
    """The process `root` and all of its descendants, as they are now."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = parent_of(stat.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended meanwhile
    return descendants(root, parents)


def present_pages(entries: bytes) -> int:
    """How many entries of /proc/PID/pagemap stand for a page that is in memory."""
    return sum(entry >> _PRESENT_BIT for entry in array("Q", entries))


def resident_mb(pid: int, ranges: Sequence[tuple[int, int]]) -> float:
    """MB of pages in memory in a process's address ranges, each (address, bytes)."""
    pages = 0
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        for address, nbytes in ranges:
            first, last = address // PAGE_BYTES, -(-(address + nbytes) // PAGE_BYTES)
            pagemap.seek(first * _ENTRY_BYTES)
            pages += present_pages(pagemap.read((last - first) * _ENTRY_BYTES))
    return pages * PAGE_BYTES / 2**20

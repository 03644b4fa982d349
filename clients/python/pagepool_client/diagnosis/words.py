"""Figures as people and flags have them. Pure text."""

from __future__ import annotations

import math

_MIB, _GIB = 1 << 20, 1 << 30


def size(count: int) -> str:
    """Bytes for people, to three digits: 1.5 KiB."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def size_flag(count: int) -> str:
    """At least so many bytes, as --pool-bytes takes them: whole MiB, from 1 GiB on quarters of a GiB."""
    if count < _GIB:
        return f"{math.ceil(count / _MIB)}MiB"
    return f"{math.ceil(4 * count / _GIB) / 4:g}GiB"


def share(part: float, whole: float) -> str:
    """A part of a whole in per cent, to a tenth below 10 %; "0 %" of nothing."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def span(seconds: float) -> str:
    """A time for people: 0.4 s, 12 s, 3 min, 2 h, 5 d."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // length} {unit}"
    return f"{seconds // 86_400} d"


def count(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun: 1 table, 2,000 tables."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"

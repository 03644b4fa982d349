"""Which Remaps a worker may acknowledge: those whose old blocks no step that may still run was launched with. Pure."""

from __future__ import annotations

from collections import deque


class Acknowledgements:
    """Counts steps, which are collected in the order of their launches. Not thread-safe."""

    def __init__(self) -> None:
        self._launched = self._collected = 0
        self._heard: deque[tuple[int, int]] = deque()  # (sequence, steps to be collected before it is true)
        self._told = 0

    def launched(self) -> None:
        """A step was launched, with what was prepared for it before."""
        self._launched += 1

    def collected(self) -> None:
        """The oldest step is over."""
        self._collected += 1

    def heard(self, sequence: int, *, prepared: bool = False) -> None:
        """A Remap has been applied to the tables; if a step is `prepared`, with old blocks, it counts as in flight."""
        self._heard.append((sequence, self._launched + prepared))

    def take(self) -> int:
        """The last Remap that may be acknowledged now, 0 if that was said before."""
        last = 0
        while self._heard and self._heard[0][1] <= self._collected:
            last = max(last, self._heard.popleft()[0])
        self._told = max(self._told, last)
        return last if last == self._told else 0

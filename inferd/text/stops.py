"""Stop texts in a stream: what may be shown, and what must wait."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Finds the stop text that is complete first; of several complete at once, the longest.

    `feed` takes text as it comes and returns what no stop text can reach any more. After `found` is set it returns "".
    The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown now: everything before a stop text, nothing that may be the start of one."""
        if self.found is not None:
            return ""
        held = self._held + text
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return held[: end - len(self.found)]
        cut = min((self._possible_start(held, stop) for stop in self._stops), default=len(held))
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _possible_start(held: str, stop: str) -> int:
        """Where the longest end of `held` begins that is a start of `stop`; len(held) if there is none."""
        at = max(len(held) - len(stop) + 1, 0)
        while (at := held.find(stop[0], at)) >= 0:
            if stop.startswith(held[at:]):
                return at
            at += 1
        return len(held)

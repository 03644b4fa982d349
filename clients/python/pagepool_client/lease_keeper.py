"""Keeping a worker's lease: heartbeats from a thread of their own, and another stream when one breaks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from pagepool.errors import PagepoolError, Reason
from pagepool.status import ForeignError

RETRY_S = 0.05
MAX_REPEATS = 5
"""How often the stream may break without progress between: what breaks it is then something that is sent each time."""
_MAY_PASS = frozenset({Reason.INTERNAL_ERROR, Reason.POOL_LOST})


def may_pass(error: PagepoolError | None) -> bool:
    """Whether the stream ended for a reason that lets the lease live: memd itself has said nothing against it."""
    return error is None or isinstance(error, ForeignError) or error.reason in _MAY_PASS


class Line(Protocol):
    """What the keeper keeps. Called from the keeper's thread."""

    def beat(self, sequence: int) -> None:
        """Send a heartbeat."""

    def reopen(self, timeout_s: float) -> bool:
        """Take the lease up again; False if that may work later. Raises PagepoolError if it never will."""

    def lost(self, message: str) -> None:
        """The lease is gone. Called at most once, and last."""


class LeaseKeeper:
    """Keeps the lease of `line` from `start` until `stop` or until it is lost. Made before the lease is asked for.

    The deadline is counted from the sending of the last heartbeat that was answered, so that memd, which counts from
    its arrival, never gives the lease up before its worker does. Where the stream breaks again and again, though memd
    gives the lease back each time, it is given up after MAX_REPEATS times without `progressed` between.
    """

    def __init__(self, line: Line, clock: Callable[[], float]) -> None:
        self._line, self._clock = line, clock
        self._interval_s = self._timeout_s = 0.0
        # Of heartbeats without an answer yet: appended to by the keeper alone, taken from by the stream's thread alone.
        self._sent: deque[tuple[int, float]] = deque()
        self._sequence = 0
        self._alive_at = clock()
        self._break: PagepoolError | None = None
        self._broken = self._stopping = False
        self._repeats = 0
        self._attention = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagepool-lease-keeper", daemon=True)

    def start(self, interval_s: float, timeout_s: float) -> None:
        """Begin to keep the lease on the terms that memd gave."""
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._thread.start()

    def stop(self) -> None:
        """Stop without a word to the line. Idempotent; not for the keeper's thread."""
        self._stopping = True
        self._attention.set()
        if self._thread.is_alive():
            self._thread.join()

    def answered(self, sequence: int) -> None:
        """A heartbeat was answered. From the stream's thread."""
        while self._sent and self._sent[0][0] <= sequence:
            number, sent_at = self._sent.popleft()
            if number == sequence:
                self._alive_at = sent_at

    def progressed(self) -> None:
        """What was due of memd has been answered, all or some of it. From the stream's thread."""
        self._repeats = 0

    def broken(self, error: PagepoolError | None) -> None:
        """The stream has ended. From the stream's thread."""
        self._break, self._broken = error, True
        self._attention.set()

    def _run(self) -> None:
        try:
            while not self._stopping:
                pause_s = self._turn()
                self._attention.wait(pause_s)
                self._attention.clear()
        except PagepoolError as error:
            self._line.lost(error.message)
        except Exception as error:
            # A worker that went on with a lease that nobody keeps would wait for ever.
            self._line.lost(f"its lease can be kept no longer ({type(error).__name__}: {error})")
            raise

    def _turn(self) -> float:
        """One look at the lease; how long to rest after it. Raises PagepoolError when the lease is lost."""
        left_s = self._alive_at + self._timeout_s - self._clock()
        if left_s <= 0:
            raise self._silence()
        if self._broken:
            return self._mend(left_s)
        self._sequence += 1
        self._sent.append((self._sequence, self._clock()))
        self._line.beat(self._sequence)
        return min(self._interval_s, left_s)

    def _mend(self, left_s: float) -> float:
        if self._break is not None and not may_pass(self._break):
            raise self._break
        if self._repeats >= MAX_REPEATS:
            raise self._repetition()
        # Before the attempt: the new stream may break in its turn, and that must not be overlooked.
        self._broken = False
        sent_at = self._clock()
        if self._line.reopen(left_s):
            self._alive_at = sent_at
            self._repeats += 1
            return 0.0
        self._broken = True
        return min(RETRY_S, left_s)

    def _repetition(self) -> PagepoolError:
        cause = self._break.message if self._break else "memd ended it in order"
        message = (
            f"the stream broke again each of the {self._repeats} times that the lease was taken up ({cause}), and no "
            "step was answered between; the lease is given up"
        )
        return PagepoolError(Reason.LEASE_LOST, message, repeats=self._repeats, cause=cause)

    def _silence(self) -> PagepoolError:
        cause = f" ({self._break.message})" if self._broken and self._break else ""
        message = f"no heartbeat was answered for {self._timeout_s:g} s{cause}; the lease is given up"
        return PagepoolError(Reason.LEASE_LOST, message, timeout_s=self._timeout_s)

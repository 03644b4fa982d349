"""Seconds, and how the protos have them."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

NANOSECONDS = 1_000_000_000


def to_duration(seconds: float) -> Duration:
    """A length of time, not negative, to the nearest nanosecond."""
    whole, nanos = divmod(round(seconds * NANOSECONDS), NANOSECONDS)
    return Duration(seconds=whole, nanos=nanos)


def to_timestamp(unix_s: float) -> Timestamp:
    """A wall-clock time, to the nearest nanosecond."""
    whole, nanos = divmod(round(unix_s * NANOSECONDS), NANOSECONDS)
    return Timestamp(seconds=whole, nanos=nanos)


def to_seconds(message: Duration | Timestamp) -> float:
    """Seconds of a duration, or since 1970."""
    return float(message.seconds + message.nanos / NANOSECONDS)

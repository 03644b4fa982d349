"""What an engine says of requests that end in an error, whatever they asked for."""

from __future__ import annotations

from inferd.core.messages import Failed
from pagepool.errors import PagepoolError, Reason


def failed(request: int, error: PagepoolError) -> Failed:
    """The message that carries an error; request 0 is the engine itself."""
    return Failed(request, str(error.reason), error.message, error.field, error.retry_after_s, error.metadata)


def pool_lost(why: str) -> PagepoolError:
    """The KV of all requests is gone."""
    message = f"the pool is lost, and the KV of all requests with it: {why}; retry"
    return PagepoolError(Reason.POOL_LOST, message, retry_after_s=1.0, why=why)


def draining() -> PagepoolError:
    """No more is begun, or the grace is over."""
    message = "the worker is stopping; try another one, or this one later"
    return PagepoolError(Reason.DRAINING, message, retry_after_s=1.0)


def engine_failed(what: str) -> PagepoolError:
    """A fault of the worker: the model or the device."""
    return PagepoolError(Reason.ENGINE_FAILED, f"{what}; retry elsewhere and look into the worker's log", what=what)

"""The one way in which a model is refused."""

from __future__ import annotations

from pagepool.errors import PagepoolError, Reason

MODEL_FLAG = "--model"


def refuse(model: str, why: str, way_out: str) -> PagepoolError:
    """An INVALID_ARGUMENT that names the model, why it cannot be served, and what to do instead."""
    message = f"{MODEL_FLAG} is {model}, which cannot be served: {why}; {way_out}"
    return PagepoolError(Reason.INVALID_FIELD, message, field=MODEL_FLAG, value=model, why=why)

"""How the continuations of a request are found: samples, the best of them, or beams. Every field's limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from inferd.core.beam_values import Beam, EarlyStopping
from pagepool.errors import PagepoolError, invalid_field
from pagepool.inferd.v1 import generation_service_pb2 as pb

MAX_SAMPLES = 64
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0

_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FULL: EarlyStopping.FULL,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


@dataclass(frozen=True, slots=True)
class Strategy:
    """`samples` are drawn and `returned` of them told, as they come or, if `ranked`, the best at the end; or beams."""

    samples: int = 1
    returned: int = 1
    ranked: bool = False
    beam: Beam | None = None

    @property
    def fields(self) -> dict[str, object]:
        """The fields of GenerateRequest that ask for it, with their values."""
        if self.beam is not None:
            return {"beam": f"{self.beam.width} wide"}
        if self.ranked:
            return {"best_of": self.samples}
        return {"n": self.samples} if self.samples > 1 else {}


def check_strategy(request: pb.GenerateRequest) -> Strategy:
    """The strategy that a request asks for. Raises INVALID_FIELD."""
    if request.HasField("beam"):
        _check_alone(request)
        beam = _beam(request.beam)
        return Strategy(1, beam.num_return_sequences, beam=beam)
    samples = request.best_of or request.n or 1
    for field, value in (("n", request.n), ("best_of", request.best_of)):
        if value > MAX_SAMPLES:
            raise invalid_field(field, value, f"at most {MAX_SAMPLES}", "send several requests with other seeds")
    if samples < request.n:
        raise invalid_field("best_of", samples, f"at least n ({request.n})", "raise it, or lower n")
    return Strategy(samples, request.n or 1, ranked=request.best_of > 0)


def _beam(given: pb.BeamSearch) -> Beam:
    if not 1 <= given.width <= MAX_BEAM_WIDTH:
        raise invalid_field("beam.width", given.width, f"from 1 to {MAX_BEAM_WIDTH}", "4 is a common width")
    penalty = given.length_penalty if given.HasField("length_penalty") else 1.0
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        limit = f"a finite number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise invalid_field("beam.length_penalty", penalty, limit, "use 1 for the mean logprob of the tokens")
    if given.early_stopping not in _STOPPING:
        limit = f"one of {', '.join(pb.EarlyStopping.keys()[1:])}"
        raise invalid_field("beam.early_stopping", given.early_stopping, limit, "leave it out for the first of them")
    if given.num_return_sequences > given.width:
        limit, remedy = f"at most beam.width ({given.width})", "raise the width, or ask for fewer"
        raise invalid_field("beam.num_return_sequences", given.num_return_sequences, limit, remedy)
    return Beam(given.width, penalty, _STOPPING[given.early_stopping], given.num_return_sequences or 1)


def _check_alone(request: pb.GenerateRequest) -> None:
    """Refuses what a beam search has no use for, instead of passing over it."""
    if request.n > 1:
        raise _beside("n", request.n, "ask for beam.num_return_sequences instead")
    if request.best_of:
        raise _beside("best_of", request.best_of, "ask for beam.num_return_sequences instead")
    if request.stop:
        raise _beside("stop", f"{len(request.stop)} texts long", "give stop_token_ids instead")
    for field in ("logprobs", "prompt_logprobs"):
        if request.HasField(field):
            raise _beside(field, getattr(request, field), "leave it out: each continuation comes with its score")
    for descriptor, value in request.sampling.ListFields():
        if descriptor.name != "temperature" or value != 0:
            given = dict(value) if descriptor.name == "logit_bias" else value
            raise _beside(f"sampling.{descriptor.name}", given, "leave it out, or ask for n samples instead of beams")


def _beside(field: str, value: object, remedy: str) -> PagepoolError:
    limit = "left out beside beam, which takes the likeliest continuations as they are"
    return invalid_field(field, value, limit, remedy)

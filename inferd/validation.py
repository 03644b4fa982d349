"""What a request may ask for: every field's limit, and the error that names it."""

from __future__ import annotations

import dataclasses
import math
import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inferd.core.messages import Adjustments, ModelCard, Sampling, Submit
from inferd.core.speculation import MAX_SPECULATE_TOKENS
from inferd.strategy import Strategy, check_strategy
from pagepool.errors import PagepoolError, Reason, invalid_field
from pagepool.inferd.v1 import generation_service_pb2 as pb
from pagepool.limits import check_priority, check_salt
from pagepool.token_ids import TOKEN_BYTES, all_below, unpack

DEFAULT_MAX_TOKENS = 256
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_PENALTY, MAX_BIAS, MAX_BIASES, MAX_LOGPROBS = 2.0, 100.0, 1024, 20
MAX_STOPS, MAX_STOP_BYTES, MAX_STOP_TOKENS = 16, 256, 64
MAX_REQUEST_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class Checked:
    """A request without its prompt, found in order; `scored` if it asked for logprobs of its tokens."""

    request_id: str
    max_tokens: int | None
    stops: list[str]
    draft: Submit
    strategy: Strategy
    scored: bool

    def submit(self, prompt: Sequence[int], card: ModelCard) -> Submit:
        """The request with its prompt. Raises PROMPT_EMPTY or PROMPT_TOO_LONG."""
        if not prompt:
            raise prompt_empty("prompt")
        left = card.max_context_tokens - len(prompt)
        if left < (self.max_tokens or 1):
            raise prompt_too_long(len(prompt), self.max_tokens or 1, card)
        max_tokens = self.max_tokens or min(DEFAULT_MAX_TOKENS, left)
        return dataclasses.replace(self.draft, prompt=prompt, max_tokens=max_tokens)


def check(request: pb.GenerateRequest, card: ModelCard) -> Checked:
    """Everything but the prompt's length. Raises INVALID_FIELD; draws the name and the seed that are not given."""
    _at_most("request_id", len(request.request_id.encode()), MAX_REQUEST_ID_BYTES, "bytes", "use a shorter name")
    if request.HasField("max_tokens") and request.max_tokens < 1:
        raise invalid_field("max_tokens", request.max_tokens, "at least 1", "leave it out for the default")
    _check_stops(request.stop)
    _at_most("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKENS, "ids", "give fewer")
    check_token_ids("stop_token_ids", request.stop_token_ids, card)
    check_salt("cache_salt", request.cache_salt)
    check_priority("priority", request.priority)
    strategy = check_strategy(request)
    for field, value in strategy.fields.items():
        _check_supported(field, value, card)
    logprobs = _logprobs("logprobs", request, card)
    draft = Submit(
        request=0,
        prompt=[],
        max_tokens=0,
        sampling=_sampling(request.sampling),
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        salt=request.cache_salt,
        priority=request.priority,
        adjustments=_adjustments(request.sampling, card),
        logprobs=0 if strategy.ranked and logprobs is None else logprobs,
        prompt_logprobs=_logprobs("prompt_logprobs", request, card),
        speculate_tokens=_speculate_tokens(request),
        n=strategy.samples,
        beam=strategy.beam,
        exact=_exact(request),
    )
    max_tokens = request.max_tokens if request.HasField("max_tokens") else None
    name, stops = request.request_id or uuid.uuid4().hex, list(request.stop)
    return Checked(name, max_tokens, stops, draft, strategy, scored=logprobs is not None)


def _exact(request: pb.GenerateRequest) -> bool | None:
    """Whether all of its KV has to be exact; None if the request does not say."""
    if request.kv_precision not in pb.KvPrecision.values():
        limit = "KV_PRECISION_EXACT or KV_PRECISION_ANY"
        raise invalid_field("kv_precision", request.kv_precision, limit, "leave it out for the worker's own")
    return request.kv_precision == pb.KV_PRECISION_EXACT if request.kv_precision else None


def check_token_ids(field: str, token_ids: Sequence[int], card: ModelCard) -> None:
    """Raises INVALID_FIELD, naming the first id outside the model's vocabulary."""
    if max(token_ids, default=0) < card.vocab_size:
        return
    for position, token in enumerate(token_ids):
        if token >= card.vocab_size:
            limit = f"a token id below {card.vocab_size}, the size of the vocabulary"
            raise invalid_field(f"{field}[{position}]", token, limit, "take ids from Tokenize of this model")


def token_prompt(prompt: pb.TokenPrompt, card: ModelCard) -> Sequence[int]:
    """The ids of a prompt. Raises PROMPT_TOO_LONG before it looks at each of them, then INVALID_FIELD."""
    packed = prompt.packed_token_ids
    count = len(packed) // TOKEN_BYTES or len(prompt.token_ids)
    if count > card.max_context_tokens:
        raise prompt_too_long(count, 1, card)
    token_ids: Sequence[int]
    if not packed:
        token_ids = prompt.token_ids[:]
    elif prompt.token_ids:
        limit, remedy = "empty beside tokens.token_ids", "give the prompt's ids once"
        raise invalid_field("tokens.packed_token_ids", f"{len(packed)} bytes long", limit, remedy)
    else:
        try:
            token_ids = unpack(packed)
        except ValueError as error:
            limit = f"a multiple of {TOKEN_BYTES} bytes"
            remedy = "send each id as a 32-bit little-endian integer"
            raise invalid_field("tokens.packed_token_ids", f"{len(packed)} bytes long", limit, remedy) from error
    if not (packed and all_below(packed, card.vocab_size)):
        check_token_ids("tokens.packed_token_ids" if packed else "tokens.token_ids", token_ids, card)
    return token_ids


def check_messages(field: str, messages: Iterable[pb.ChatMessage]) -> list[dict[str, str]]:
    """The messages as a chat template takes them. Raises INVALID_FIELD if there are none, or one without a role."""
    plain = [{"role": message.role, "content": message.content} for message in messages]
    if not plain:
        raise invalid_field(field, "empty", "at least one message", 'send one with role "user"')
    for position, message in enumerate(plain):
        if not message["role"]:
            raise invalid_field(f"{field}[{position}].role", "empty", "a role", 'send "system", "user" or "assistant"')
    return plain


def prompt_empty(field: str) -> PagepoolError:
    """PROMPT_EMPTY, to be raised."""
    return PagepoolError(
        Reason.PROMPT_EMPTY, f"{field} has no tokens, but needs at least 1; send some text", field=field
    )


def prompt_too_long(prompt_tokens: int, max_tokens: int, card: ModelCard, *, at_least: bool = False) -> PagepoolError:
    """PROMPT_TOO_LONG, to be raised; `at_least` says that the prompt was not counted to its end."""
    message = (
        f"prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens and max_tokens is {max_tokens}, but the "
        f"model's context holds {card.max_context_tokens} in all; shorten the prompt or ask for fewer tokens"
    )
    return PagepoolError(
        Reason.PROMPT_TOO_LONG,
        message,
        field="prompt",
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        max_context_tokens=card.max_context_tokens,
    )


def _sampling(given: pb.SamplingParams) -> Sampling:
    temperature = given.temperature if given.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and 0 <= temperature <= MAX_TEMPERATURE):
        limit = f"a finite number from 0 to {MAX_TEMPERATURE:g}"
        raise invalid_field("sampling.temperature", temperature, limit, "use 0 for greedy, 1 for the model's own")
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise invalid_field("sampling.top_p", top_p, "above 0 and at most 1", "leave it out to keep all tokens")
    if given.top_k < 0:
        raise invalid_field("sampling.top_k", given.top_k, "at least 0", "use 0 to keep all tokens")
    if not 0 <= given.min_p <= 1:
        raise invalid_field("sampling.min_p", given.min_p, "from 0 to 1", "use 0 to keep all tokens")
    seed = given.seed if given.HasField("seed") else secrets.randbits(64)
    return Sampling(temperature, top_p, given.top_k, given.min_p, seed, given.sample_index)


def _adjustments(given: pb.SamplingParams, card: ModelCard) -> Adjustments | None:
    """What is asked of the logits; None if that is nothing."""
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    if not MIN_REPETITION_PENALTY <= repetition <= MAX_REPETITION_PENALTY:
        limit = f"from {MIN_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}"
        raise invalid_field("sampling.repetition_penalty", repetition, limit, "use 1 for no penalty")
    for name, value in (("presence", given.presence_penalty), ("frequency", given.frequency_penalty)):
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            limit = f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}"
            raise invalid_field(f"sampling.{name}_penalty", value, limit, "use 0 for no penalty")
    biases = dict(given.logit_bias)
    _check_biases(biases, card)
    found = Adjustments(
        list(biases), list(biases.values()), repetition, given.presence_penalty, given.frequency_penalty
    )
    asked: dict[str, float | str | None] = {
        "repetition_penalty": None if repetition == 1 else repetition,
        "presence_penalty": found.presence_penalty or None,
        "frequency_penalty": found.frequency_penalty or None,
        "logit_bias": f"{len(biases)} ids long" if biases else None,
    }
    wishes = {name: wish for name, wish in asked.items() if wish is not None}
    for name, wish in wishes.items():
        _check_supported(f"sampling.{name}", wish, card)
    return found if wishes else None


def _check_biases(biases: dict[int, float], card: ModelCard) -> None:
    _at_most("sampling.logit_bias", len(biases), MAX_BIASES, "ids", "give fewer")
    for token, bias in biases.items():
        field = f"sampling.logit_bias[{token}]"
        if token >= card.vocab_size:
            limit = f"of a token id below {card.vocab_size}, the size of the vocabulary"
            raise invalid_field(field, bias, limit, "take ids from Tokenize of this model")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            limit = f"from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            raise invalid_field(field, bias, limit, "use -100 to forbid a token")


def _logprobs(field: str, request: pb.GenerateRequest, card: ModelCard) -> int | None:
    """How many of the likeliest tokens are asked for; None if no logprobs are."""
    if not request.HasField(field):
        return None
    count: int = getattr(request, field)
    if count > MAX_LOGPROBS:
        raise invalid_field(field, count, f"at most {MAX_LOGPROBS}", "ask for fewer")
    _check_supported(field, count, card)
    return count


def _speculate_tokens(request: pb.GenerateRequest) -> int | None:
    """The longest draft that is asked for; None leaves it to the engine."""
    if not request.HasField("speculate_tokens"):
        return None
    if request.speculate_tokens > MAX_SPECULATE_TOKENS:
        remedy = "ask for fewer, or use 0 for no speculation"
        raise invalid_field("speculate_tokens", request.speculate_tokens, f"at most {MAX_SPECULATE_TOKENS}", remedy)
    return request.speculate_tokens


def _check_supported(field: str, value: object, card: ModelCard) -> None:
    if field in card.unsupported_fields:
        limit = "left out: this worker's device cannot do it yet"
        raise invalid_field(field, value, limit, "leave it out, or ask a worker on a CPU")


def _check_stops(stops: Iterable[str]) -> None:
    sizes = [len(stop.encode()) for stop in stops]
    _at_most("stop", len(sizes), MAX_STOPS, "texts", "give fewer")
    for position, size in enumerate(sizes):
        if not 1 <= size <= MAX_STOP_BYTES:
            limit = f"from 1 to {MAX_STOP_BYTES} bytes long"
            raise invalid_field(f"stop[{position}]", f"{size} bytes long", limit, "shorten it or leave it out")


def _at_most(field: str, size: int, limit: int, unit: str, remedy: str) -> None:
    if size > limit:
        raise invalid_field(field, f"{size} {unit} long", f"at most {limit} {unit}", remedy)

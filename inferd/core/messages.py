"""What the front process and the engine process tell each other. Plain values; `inferd.channel` carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from inferd.core.beam_values import Beam


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; values are checked by the front. temperature 0 is greedy, top_k 0 is all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What is done to the logits first: biases[i] is added to that of bias_token_ids[i]; see inferd.adjust."""

    bias_token_ids: list[int] = dataclasses.field(default_factory=list)
    biases: list[float] = dataclasses.field(default_factory=list)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalises(self) -> bool:
        """Whether it depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


LOGITS_FIELDS = (
    "sampling.repetition_penalty",
    "sampling.presence_penalty",
    "sampling.frequency_penalty",
    "sampling.logit_bias",
    "logprobs",
    "prompt_logprobs",
    "best_of",
    "beam",
)
"""Fields of GenerateRequest that need the logits themselves, which not every device gives; see ModelCard."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What an engine process needs to know; the front's first message to it. Values are those of inferd's flags.

    model is a hub id, a local folder or a GGUF file. memd is a gRPC target. threads 0 is one per core; max_batch_tokens
    and max_num_seqs 0 are the device's defaults.
    """

    model: str
    memd: str
    name: str = "inferd"
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    max_batch_tokens: int = 0
    max_num_seqs: int = 0
    max_queue: int = 1024
    prefix_wait_s: float = 10.0
    speculate_tokens: int = 0
    chunked_prefix: bool = True
    exact: bool = False
    warmup: bool = True
    compile: bool = True
    graphs: bool = True
    cache_dir: str = ""
    log_level: str = "info"
    log_format: str = "auto"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What the front must know of the model; sent once by an engine, when it has loaded it.

    folder holds the config as transformers reads it. tokenizer is a folder with the tokenizer.json,
    tokenizer_config.json and, if the model has one, chat_template.jinja that transformers itself wrote, so that the
    front needs neither transformers nor torch. digest is SHA-256 over config and weights. unsupported_fields are those
    of LOGITS_FIELDS that the engine's device cannot do: the front refuses them.
    """

    folder: str
    tokenizer: str
    architecture: str
    max_context_tokens: int
    vocab_size: int
    dtype: str
    eos_token_ids: list[int]
    digest: bytes
    unsupported_fields: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request. `request` is the front's number for it, never reused.

    logprobs n asks for those of each token generated and of the n likeliest beside it, prompt_logprobs n for those of
    the prompt's tokens: such a request computes its whole prompt, whatever of it the pool has. speculate_tokens are the
    most to guess a step, exact says whether no KV may be stored lossily; None is the engine's default.

    n asks for so many samples of one prompt: sample i has the number request + i, which belongs to it alone, and
    sampling.sample_index + i. Each ends by itself; the prompt's logprobs come under the first number. beam asks for
    a search: no tokens come, but inferd.core.beam.Hypotheses before Finished.
    """

    request: int
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    ignore_eos: bool = False
    salt: bytes = b""
    priority: int = 0
    adjustments: Adjustments | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculate_tokens: int | None = None
    n: int = 1
    beam: Beam | None = None
    exact: bool | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop a request: its blocks go back within one step. Answered by Finished(CANCELLED) unless it ended already.

    Of several samples it stops the one of this number; before they have a token the first one's number stops all.
    """

    request: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish what runs within `grace_s` seconds, detach from memd, exit."""

    grace_s: float


class Ending(StrEnum):
    """Why a request ended in the engine."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    MAX_TOKENS = "max_tokens"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Used:
    """What a request used; times in seconds.

    preemptions: how often its blocks went to a more urgent request. accepted_tokens: its drafts that were right.
    lossy_tokens: those whose KV it read from FP8 blocks in the end.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    lossy_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of several requests, one entry per request: [request, token ids]."""

    items: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found a token, and the likeliest ones, likeliest first; natural logarithms.

    Of the model's own logits, before adjustments, temperature and the rest of sampling. -inf where those say so.
    """

    token_id: int
    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """New tokens of requests that asked for logprobs, for which Tokens has nothing; one entry per request."""

    items: list[tuple[int, list[TokenLogprobs]]]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt tokens, from `first_position` on; all of them, in order, before the request's first token."""

    request: int
    first_position: int
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is complete; every token was delivered before. The token that ended it is not among them.

    stop_logprob is that of the token that ended it, if the request asked for logprobs.
    """

    request: int
    ending: Ending
    used: Used
    stop_token_id: int | None = None
    stop_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended in an error; the fields are those of pagepool.errors.PagepoolError.

    Request 0 is the engine itself: it cannot start with what it was told (a model that cannot be served, another
    geometry than the pool's), and exits next. The front reports it and exits too, instead of starting it again.
    """

    request: int
    reason: str
    message: str
    field: str = ""
    retry_after_s: float | None = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counters:
    """What the engine has done since its start; times in seconds.

    step_s is the time of its steps: each from when the engine began with it, or the step before was over, until its
    tokens were handed over. forward_s is what the model's forward had of it, without sampling. preemptions counts how
    often a request gave its blocks up for a more urgent one, recomputed_tokens those whose KV was computed again after
    it, and starved_steps the steps that a sequence had no part in because memd had not granted its next block yet.
    prefix_waits counts the requests that waited for a prefix which another one was computing, prefix_waits_overdue
    those of them that waited for as long as they may.
    """

    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    forward_s: float = 0.0
    step_s: float = 0.0
    memd_unary_calls: int = 0
    memd_steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    starved_steps: int = 0
    prefix_waits: int = 0
    prefix_waits_overdue: int = 0


@dataclass(frozen=True, slots=True)
class EngineState:
    """How the engine is; sent at each change of phase, and at most once a second while it works.

    phase is "loading", "attaching" (waits for memd), "warming_up", "serving" or "stopped"; detail is for people. Of the
    requests that are waiting, awaiting_prefix wait for a prefix that another one is computing.
    """

    phase: str
    detail: str = ""
    pool_epoch: int = 0
    block_size: int = 0
    num_blocks: int = 0
    waiting: int = 0
    running: int = 0
    counters: Counters = dataclasses.field(default_factory=Counters)
    awaiting_prefix: int = 0

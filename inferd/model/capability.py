"""What can be said about a model from its config and class alone, before any weight is read.

Judged by capability, never by a model's name. What this cannot see, `probe` finds by running the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from inferd.model.refusal import refuse

SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Values of `layer_types` whose only state is the K and V handed to the attention function."""

UNBOUNDED_CONTEXT = 1 << 20
"""Tokens; for a model that states no limit of its own."""

_ANOTHER_MODEL = "choose a decoder whose layers use transformers' attention interface"


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """Most tokens of one sequence, and why, where that is less than the config says."""

    tokens: int
    reason: str = ""


def check_config(model: str, config: PretrainedConfig) -> None:
    """Raise PagepoolError unless the architecture can be served over a paged pool."""
    if config.is_encoder_decoder:
        raise refuse(model, "it is an encoder-decoder, whose cross attention does not go to the pool", _ANOTHER_MODEL)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if architecture is None:
        way_out = "choose a causal language model that this version of transformers implements"
        raise refuse(model, f"transformers has no causal language model for the type {config.model_type!r}", way_out)
    if isinstance(architecture, tuple):
        architecture = architecture[0]
    # transformers has no public form of these two.
    if architecture._is_stateful:  # noqa: SLF001
        raise refuse(model, f"{architecture.__name__} keeps state outside the attention function", _ANOTHER_MODEL)
    if not architecture._can_set_attn_implementation():  # noqa: SLF001
        why = f"{architecture.__name__} does not support transformers' attention interface"
        raise refuse(model, why, _ANOTHER_MODEL)
    text = config.get_text_config(decoder=True)
    strangers = sorted(set(getattr(text, "layer_types", None) or ()) - SERVABLE_LAYER_TYPES)
    if strangers:
        why = f"its layer types {', '.join(strangers)} keep state, or choose keys, outside the attention function"
        raise refuse(model, why, _ANOTHER_MODEL)
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise refuse(model, "its attention is bidirectional", "choose a causal language model")


def context_limit(config: PretrainedConfig) -> ContextLimit:
    """The longest sequence for which a cached key never changes afterwards.

    Dynamic NTK and LongRoPE choose other frequencies once a sequence outgrows the original length. Keys cached before
    would then be stale, and one long sequence would change its batch mates; so they are served up to that length.
    """
    text = config.get_text_config(decoder=True)
    limits = [ContextLimit(getattr(text, "max_position_embeddings", None) or UNBOUNDED_CONTEXT)]
    for rope in _rope_parameters(text):
        kind = str(rope.get("rope_type", "default"))
        reason = f"beyond it, RoPE of the type {kind} changes the frequencies that cached keys were rotated with"
        if kind == "longrope":
            limits.append(ContextLimit(int(rope["original_max_position_embeddings"]), reason))
        elif "dynamic" in kind:
            limits[0] = ContextLimit(limits[0].tokens, reason)
    if getattr(text, "attn_temperature_tuning", False):
        reason = "beyond it, attention temperature follows the place in the batch instead of the position"
        limits.append(ContextLimit(int(text.floor_scale) - 1, reason))
    return min(limits, key=lambda limit: limit.tokens)


def _rope_parameters(text: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters of a config; some configs have one set for each layer type."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, Mapping))

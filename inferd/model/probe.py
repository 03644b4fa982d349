"""Finds out how a loaded model uses attention by running it, and proves on a tiny batch that paging changes nothing.

Geometry comes from the shapes that really reach the attention function, not from what a config seems to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from inferd.model.attention import AttentionLayer, attending
from inferd.model.refusal import refuse
from pagekernels.layout import LayerShape
from pagekernels.ops import AttentionParams

_ANOTHER_MODEL = "choose a decoder in which every layer uses transformers' attention interface"

_HARMLESS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "position_embeddings"}
)
"""Keyword arguments that are honoured, or that concern what happens before attention."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What a model stores and how each of its attention layers uses it, by `layer_idx`, in the order of the calls."""

    shapes: tuple[LayerShape, ...]
    layers: Mapping[int, AttentionLayer]


class Recorder:
    """An attention function that writes down every call and answers with zeros."""

    def __init__(self, model: str, config: PretrainedConfig) -> None:
        self._model = model
        self._config = config
        self._keys: list[torch.Tensor] = []  # of each store; kept, so that no later tensor has the same address
        self._shapes: list[LayerShape] = []
        self._layers: dict[int, AttentionLayer] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Record the call; raises PagepoolError if it asks for something that paged attention cannot give."""
        index = cast("int", getattr(module, "layer_idx", None))
        name = type(module).__name__
        if index is None or index in self._layers:
            raise self._refused(f"{name} calls attention twice in one layer, or does not number its layers")
        if mask is not None:
            raise self._refused(f"{name} brings an attention mask of its own")
        if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
            raise self._refused(f"{name} is not causal")
        strange = sorted(k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and k not in _HARMLESS)
        if strange:
            raise self._refused(f"{name} passes {', '.join(strange)} to attention, which would be ignored")
        if query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
            raise self._refused(f"{name} attends with queries {list(query.shape)} to keys {list(key.shape)}")
        params = _params(module, query, kwargs, self._config)
        store = next((i for i, seen in enumerate(self._keys) if seen.data_ptr() == key.data_ptr()), None)
        if store is None:
            self._keys.append(key)
            self._shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3], params.window))
        place = len(self._keys) - 1 if store is None else store
        self._layers[index] = AttentionLayer(place, store is None, params, query.shape[1])
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3]))

    def geometry(self) -> ModelGeometry:
        """What was seen; raises PagepoolError unless each layer of the model called exactly once."""
        expected = set(range(int(self._config.num_hidden_layers)))
        silent = sorted(expected - self._layers.keys())
        if silent or self._layers.keys() - expected:
            why = (
                f"{len(silent)} of its {len(expected)} layers (first: {silent[:1]}) do not use the attention interface"
            )
            raise self._refused(why)
        return ModelGeometry(tuple(self._shapes), self._layers)

    def _refused(self, why: str) -> Exception:
        return refuse(self._model, why, _ANOTHER_MODEL)


def _params(
    module: torch.nn.Module, query: torch.Tensor, kwargs: Mapping[str, Any], config: PretrainedConfig
) -> AttentionParams:
    """Read everything that changes the result from one call."""
    scaling, sinks = kwargs.get("scaling"), kwargs.get("s_aux")
    layer_types = getattr(config, "layer_types", None) or {}
    chunked = bool(layer_types) and layer_types[module.layer_idx] == "chunked_attention"
    return AttentionParams(
        scale=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        window=int(kwargs.get("sliding_window") or 0),
        chunk=int(config.attention_chunk_size) if chunked else 0,
        softcap=float(kwargs.get("softcap") or 0.0),
        sinks=None if sinks is None else sinks.detach().float().cpu().numpy().copy(),
    )


@torch.inference_mode()
def record(name: str, model: PreTrainedModel) -> ModelGeometry:
    """Run two tokens through the model and return its geometry; raises PagepoolError if it cannot be served."""
    config = model.config.get_text_config(decoder=True)
    recorder = Recorder(name, config)
    tokens, last = torch.tensor([[0, 1]], device=model.device), torch.tensor([1], device=model.device)
    with attending(recorder):
        forward(model, tokens, tokens, last)
    return recorder.geometry()


def forward(
    model: PreTrainedModel, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Logits [N, V] of the wanted rows of packed tokens [1, T], on the model's device; without transformers' cache."""
    output = model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows)
    return cast("torch.Tensor", output.logits[0])

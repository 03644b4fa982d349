"""Requests whose settings differ, for one batch."""

from __future__ import annotations

from typing import Any

from inferd.core.messages import Adjustments, Sampling

GREEDY = Sampling(temperature=0)
PENALTIES = Adjustments(repetition_penalty=1.4, presence_penalty=0.9, frequency_penalty=0.5)
BIAS = Adjustments(bias_token_ids=[5, 9, 77], biases=[4.0, 3.5, -100.0])

MIX: list[tuple[Sampling, dict[str, Any]]] = [
    (GREEDY, {}),
    (GREEDY, {"adjustments": PENALTIES}),
    (Sampling(seed=3), {"adjustments": PENALTIES, "logprobs": 4}),
    (Sampling(seed=4, top_k=9), {"adjustments": BIAS}),
    (GREEDY, {"logprobs": 0, "prompt_logprobs": 3}),
    (Sampling(seed=5, temperature=1.7), {"adjustments": PENALTIES, "prompt_logprobs": 0}),
    (Sampling(seed=6), {}),
    (GREEDY, {"adjustments": Adjustments(frequency_penalty=2.0), "logprobs": 20, "prompt_logprobs": 20}),
]
"""How each samples, and what else it asks for: fields of Submit."""

"""Merged projections and multiplication by shape give what the model's own modules gave."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from inferd.model import linear, merge
from inferd.model.attention import attending
from inferd.model.load import prepare
from inferd.model.probe import Recorder, forward
from tests.cpu.model_configs import random_model
from tests.cpu.model_rig import Rig, random_prompts


def groups_of(name: str) -> list[set[str]]:
    """The names of projections that would be merged in the first layer of a model."""
    model = random_model(name)
    model.set_attn_implementation("pagepool")
    names = {module: name for name, module in model.named_modules()}
    with torch.inference_mode(), merge.watching(model) as groups, attending(Recorder(name, model.config)):
        forward(model, torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([1]))
    full = [{names[child] for child in group} for group in groups]
    return [{n.rsplit(".", 1)[1] for n in group} for group in full if all(".0." in n for n in group)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [{"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}]),
        ("deepseek_v3", [{"q_a_proj", "kv_a_proj_with_mqa"}, {"gate_proj", "up_proj"}]),
        ("phi3", []),
    ],
)
def test_what_reads_one_input_is_found_by_watching_not_by_name(name: str, expected: list[set[str]]) -> None:
    assert groups_of(name) == expected


class Pair(nn.Module):
    """Two projections, which may be called with one input or with two."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 5, bias=bias), nn.Linear(8, 3, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(y)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_merged_pair_computes_the_same_also_when_its_inputs_are_not_one(bias: bool) -> None:
    pair = Pair(bias=bias)
    x, y = torch.randn(2, 4, 8)
    expected = [pair(x, x), pair(x, y)]

    merge.merge(pair, [(pair.first, pair.second)], linear.Multiply(widen=False))

    assert type(pair.second) is not nn.Linear
    for got, wanted in zip([pair(x, x), pair(x, y)], expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_merged_weights_are_not_stored_twice() -> None:
    pair = Pair(bias=False)
    merge.merge(pair, [(pair.first, pair.second)], linear.Multiply(widen=False))

    assert pair.first.weight.untyped_storage().data_ptr() == pair.second.weight.untyped_storage().data_ptr()
    assert pair.first.weight.untyped_storage().nbytes() == (5 + 3) * 8 * 4


def test_merged_and_unmerged_models_say_the_same() -> None:
    prompts = random_prompts((5, 30), 199)
    said = [
        Rig(prepare("llama", random_model("llama"), merged=merged), 16).generate(prompts, 10)
        for merged in (True, False)
    ]

    assert said[0] == said[1]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
def test_float32_products_are_those_of_linear(rows: int) -> None:
    x, weight = torch.randn(1, rows, 64), torch.randn(2100, 64)
    got = linear.Multiply(widen=True)(x, weight, None)

    torch.testing.assert_close(got, functional.linear(x, weight), rtol=1e-5, atol=1e-4)
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_products_are_the_float32_products_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in [(1, 6, 64), (2100, 64), (2100,)])
    got = linear.Multiply(widen=True)(x, weight, bias)

    exact = functional.linear(x.double(), weight.double(), bias.double())
    error = (got.double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert got.dtype is dtype
    assert error.max().item() <= torch.finfo(dtype).eps

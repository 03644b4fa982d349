"""Merged projections and multiplication by shape give what the model's own modules gave."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface

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


def test_old_weights_go_back_group_by_group_also_while_the_caller_still_has_the_list() -> None:
    model = nn.ModuleList([Pair(bias=False) for _ in range(3)])
    groups: list[merge.Group] = [(pair.first, pair.second) for pair in model]  # type: ignore[misc]
    old = [weakref.ref(linear.weight) for group in groups for linear in group]
    alive = []

    def cat(tensors: list[torch.Tensor]) -> torch.Tensor:
        alive.append(sum(each() is not None for each in old))
        return concatenate(tensors)

    concatenate = torch.cat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", cat)
        merge.merge(model, groups, functional.linear)

    assert alive == [6, 4, 2]
    assert not any(each() for each in old)


@torch.library.custom_op("pagepool_test::attend", mutates_args=())
def attend(query: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    return query.transpose(1, 2)[..., : value.shape[3]] * (layer + 1)


@attend.register_fake
def _attend_shape(query: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    del layer
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))


AttentionInterface.register(
    "pagepool_test", lambda module, query, _key, value, _mask, **_: (attend(query, value, module.layer_idx), None)
)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_torch_compile_traces_a_merged_model_once_for_all_sizes_with_constant_weight_shapes(name: str) -> None:
    model = random_model(name)
    model.set_attn_implementation("pagepool")
    with torch.inference_mode(), merge.watching(model) as groups, attending(Recorder(name, model.config)):
        forward(model, torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), torch.tensor([1]))
    merge.merge(model, groups, functional.linear)
    model.set_attn_implementation("pagepool_test")
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(partial(forward, model), backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for count in (3, 8, 2, 40):
            step = torch.arange(count)[None] + 3, torch.arange(count)[None], torch.arange(min(count, 2))
            torch.testing.assert_close(compiled(*step), forward(model, *step))

    assert len(graphs) == 1
    inputs = [node.meta["example_value"] for node in graphs[0].graph.nodes if node.op == "placeholder"]
    weights = [each for each in inputs if isinstance(each, nn.Parameter)]
    merged = {module.merged_weight.shape for module in model.modules() if hasattr(module, "merged_weight")}
    assert merged <= {each.shape for each in weights}
    assert all(isinstance(size, int) for each in weights for size in each.shape)
    boxes = [module._box for module in model.modules() if hasattr(module, "_box")]
    assert {(box.input, box.output, box.takers) for box in boxes} == {(None, None, 0)}


def test_merged_and_unmerged_models_say_the_same() -> None:
    prompts = random_prompts((5, 30), 199)
    said = [
        Rig(prepare("llama", random_model("llama"), merged=merged), 16).generate(prompts, 10)
        for merged in (True, False)
    ]

    assert said[0] == said[1]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 7, 16, 17, 128, 140])
def test_float32_products_are_those_of_linear(rows: int, width: int, *, with_bias: bool) -> None:
    x, weight, bias = torch.randn(1, rows, width), torch.randn(2100, width), torch.randn(2100) if with_bias else None
    got = linear.Multiply(widen=True)(x, weight, bias)

    torch.testing.assert_close(got, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert got.is_contiguous()


@pytest.mark.parametrize(("width", "dtype"), [(32, torch.float32), (64, torch.bfloat16)])
def test_a_product_of_what_does_not_fit_is_refused(width: int, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=r"shape|dtype|type"):
        linear.Multiply(widen=True)(torch.ones(1, width, dtype=dtype), torch.ones(40, 64), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_product_is_the_same_bits_whatever_rows_stand_beside_it(dtype: torch.dtype) -> None:
    multiply = linear.Multiply(widen=True)
    x, weight = torch.randn(16, 80).to(dtype), torch.randn(70, 80).to(dtype)
    whole = multiply(x, weight, None)

    for rows in (2, 3, 5, 8, 15):
        assert torch.equal(multiply(x[-rows:], weight, None), whole[-rows:])


@pytest.mark.parametrize("rows", [2, 3, 6, 16, 30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_widened_products_are_the_float32_products_rounded_once(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = (torch.randn(shape).to(dtype) for shape in [(1, rows, 64), (2100, 64), (2100,)])
    got = linear.Multiply(widen=True)(x, weight, bias)

    exact = functional.linear(x.double(), weight.double(), bias.double())
    error = (got.double() - exact).abs() / exact.abs().clamp(min=1.0)
    assert got.dtype is dtype
    assert error.max().item() <= torch.finfo(dtype).eps

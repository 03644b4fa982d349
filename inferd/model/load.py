"""From a model folder to a model that is ready to be run over a pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import is_accelerate_available

from inferd.model import linear, merge, proof
from inferd.model.attention import ATTENTION_NAME
from inferd.model.capability import check_config, context_limit
from inferd.model.probe import ModelGeometry, record
from inferd.model.refusal import refuse
from pagekernels.layout import LAYOUT_LINEAR, LAYOUT_SWIZZLED, Format, PagedLayout
from pagepool.errors import PagepoolError, invalid_field

FORMATS = {torch.float32: Format.F32, torch.float16: Format.F16, torch.bfloat16: Format.BF16}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO_DTYPE = "auto"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded, probed and proven model, and what others need to know of it.

    name                 as it was given
    architecture         transformers' name of the class
    geometry             the layers that store KV, from the shapes seen
    format               the pool's native format; the weights have the same dtype
    max_context          most tokens of one sequence; limit_reason says why it is less than the config's
    eos_token_ids        tokens that end a continuation
    """

    name: str
    model: PreTrainedModel
    architecture: str
    geometry: ModelGeometry
    format: Format
    dtype: str
    max_context: int
    limit_reason: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def layout(self, block_size: int) -> PagedLayout:
        """The layout of this model's blocks on its device; raises ValueError if the block size cannot be."""
        version = LAYOUT_LINEAR if self.model.device.type == "cpu" else LAYOUT_SWIZZLED
        return PagedLayout(block_size, self.geometry.shapes, self.format, version)


def load_model(
    folder: Path,
    *,
    name: str = "",
    dtype: str = AUTO_DTYPE,
    device: torch.device = CPU,
    merged: bool = True,
    tell: Callable[[str], None] = print,
) -> ServedModel:
    """Load the model in a folder that `source.resolve` has given onto a device, and prove that it can be served.

    dtype "auto" is the checkpoint's, save that a CPU without 16-bit arithmetic gets float32. `merged` runs projections
    that share an input as one. Raises PagepoolError if the model is refused, or too large for the device.
    """
    name = name or str(folder)
    config = _config(name, folder)
    check_config(name, config)
    chosen = choose_dtype(dtype, getattr(config, "dtype", None), device.type)
    tell(f"loading {name} as {str(chosen).removeprefix('torch.')}")
    try:
        served = prepare(name, _weights(name, folder, config, chosen, device), merged=merged)
    except torch.OutOfMemoryError as error:
        raise _too_large(name, chosen, device) from error
    if served.limit_reason:
        tell(f"sequences of {name} are limited to {served.max_context} tokens: {served.limit_reason}")
    return served


def _config(name: str, folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        way_out = "mend its config.json, or install a transformers that knows the architecture"
        raise refuse(name, f"transformers cannot read its config: {reason}", way_out) from error
    return config


def auto_dtype(name: str, folder: Path, kind: str) -> str:
    """What the dtype "auto" is for the model in a folder on a kind of device ("cpu", "cuda"), as --dtype says it.

    Raises PagepoolError if transformers cannot read its config.
    """
    chosen = choose_dtype(AUTO_DTYPE, getattr(_config(name, folder), "dtype", None), kind)
    return str(chosen).removeprefix("torch.")


def _weights(
    name: str, folder: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Read the weights; a weight that the files lack would be a random one, so it is refused."""
    way_out = "fetch or convert the model again"
    # Each weight goes to the device as it is read, so that the host never holds them all; transformers does that by way
    # of accelerate.
    direct = {"device_map": {"": device}} if device.type != "cpu" and is_accelerate_available() else {}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, local_files_only=True, output_loading_info=True, **direct
        )
        model.to(device)
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise refuse(name, f"transformers cannot load its weights: {reason}", way_out) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise refuse(name, f"its weight files lack {len(missing)} weights, the first being {missing[0]}", way_out)
    if device.type == "cpu":
        _own(model)
    served: PreTrainedModel = model
    return served


def _own(model: PreTrainedModel) -> None:
    """Copy weights that lie in a mapped file, one by one: what is merged next would stay in memory as its pages."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _too_large(name: str, dtype: torch.dtype, device: torch.device) -> PagepoolError:
    free, total = torch.cuda.mem_get_info(device)
    why = (
        f"its weights as {str(dtype).removeprefix('torch.')} do not fit into the GPU's free memory "
        f"({free + torch.cuda.memory_reserved(device)} of {total} bytes, when it began)"
    )
    return refuse(
        name, why, "start memd with a larger --reserve-bytes, stop what else uses the GPU, or serve a smaller model"
    )


def prepare(name: str, model: PreTrainedModel, *, merged: bool = True) -> ServedModel:
    """Make a model in memory ready to be served where it lies; raises PagepoolError if it cannot be. Changes it."""
    check_config(name, model.config)
    model = model.eval().requires_grad_(requires_grad=False)
    expected = proof.eager_rows(model)
    model.set_attn_implementation(ATTENTION_NAME)
    with merge.watching(model) as groups:
        geometry = record(name, model)
    if merged:
        _merge(model, groups)
    format_ = _format(name, model.dtype)
    proof.check_equal(name, expected, proof.paged_rows(model, geometry, format_), model.dtype)
    limit = context_limit(model.config)
    return ServedModel(
        name=name,
        model=model,
        architecture=type(model).__name__,
        geometry=geometry,
        format=format_,
        dtype=str(model.dtype).removeprefix("torch."),
        max_context=limit.tokens,
        limit_reason=limit.reason,
        vocab_size=int(model.config.get_text_config(decoder=True).vocab_size),
        eos_token_ids=eos_token_ids(model),
    )


def _merge(model: PreTrainedModel, groups: list[merge.Group]) -> None:
    """Merge projections; on the CPU, all others are multiplied by the routine for their shape too."""
    if model.device.type != "cpu":
        merge.merge(model, groups, functional.linear)
        torch.cuda.empty_cache()  # others share the GPU
        return
    multiply = linear.Multiply(widen=not has_16_bit_arithmetic())
    merge.merge(model, groups, multiply)
    linear.swap(model, multiply)


def choose_dtype(flag: str, checkpoint: torch.dtype | None, kind: str = "cpu") -> torch.dtype:
    """The dtype to load in on a kind of device; raises PagepoolError on a value that --dtype does not know."""
    if flag == AUTO_DTYPE:
        known = checkpoint in FORMATS and (kind != "cpu" or has_16_bit_arithmetic())
        return checkpoint if known and checkpoint is not None else torch.float32
    if flag not in DTYPES:
        raise invalid_field("--dtype", flag, f"one of auto, {', '.join(DTYPES)}", "choose one of these")
    return DTYPES[flag]


def has_16_bit_arithmetic() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16 or AMX); without it float32 is faster."""
    cpu = torch.backends.cpu
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()) if cpu else False  # noqa: SLF001


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end a continuation: those of the generation config, and those of the config."""
    sources = (
        getattr(model, "generation_config", None) or GenerationConfig(),
        model.config.get_text_config(decoder=True),
    )
    found: list[int] = []
    for source in sources:
        ids: Any = getattr(source, "eos_token_id", None)
        found.extend([ids] if isinstance(ids, int) else ids or [])
    return tuple(dict.fromkeys(found))


def _format(name: str, dtype: torch.dtype) -> Format:
    if dtype not in FORMATS:
        raise refuse(name, f"its dtype is {dtype}", f"choose --dtype {', '.join(DTYPES)}")
    return FORMATS[dtype]

"""A model folder of any size without a download: a config, random bfloat16 weights and a tokenizer of as many tokens.

Every weight is drawn as transformers initialises it (normal, standard deviation 0.02; norms 1), so logits are finite
and spread like a young model's; what the model says means nothing. One block of random numbers of odd length is laid
out again and again, so that 15 GB take as long as writing them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 2048,
    },
}
_NUM_FILES = 8
_DRAWN = 2**26 - 5
_STD = 0.02


def write_config(folder: Path, shape: str) -> None:
    """The config of a Qwen2 model of one of SHAPES."""
    end = SHAPES[shape]["vocab_size"] - 1
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": end,
        "eos_token_id": end,
        "use_sliding_window": False,
        "sliding_window": None,
        **SHAPES[shape],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer: the bytes, then words of four letters, then the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = itertools.product(string.ascii_lowercase, repeat=4)
    words = itertools.chain(sorted(pre_tokenizers.ByteLevel.alphabet()), ("Ġ" + "".join(word) for word in letters))
    ids = {word: number for number, word in enumerate(itertools.islice(words, vocab - 1))}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the weights that transformers expects."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(weight.shape) for name, weight in model.state_dict().items()}


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """What a safetensors file begins with."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        table[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(name: str, count: int, drawn: memoryview, at: int) -> Iterator[memoryview | bytes]:
    """The bytes of a weight; `at` is where in `drawn` they begin."""
    if name.endswith("norm.weight"):
        yield torch.ones(count, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
        return
    at %= _DRAWN
    while count:
        piece = drawn[at : at + count]
        yield piece
        at, count = 0, count - len(piece)


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], drawn: memoryview, at: int) -> None:
    with path.open("wb") as file:
        file.write(_header(shapes))
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            for piece in _pieces(name, count, drawn, at):
                file.write(piece)
            at += count


def write_weights(folder: Path) -> None:
    """Random weights for the config in the folder, in safetensors files written side by side."""
    shapes = shapes_of(folder)
    parts = [dict(list(shapes.items())[part::_NUM_FILES]) for part in range(_NUM_FILES)]
    names = [f"model-{part:05}-of-{_NUM_FILES:05}.safetensors" for part in range(_NUM_FILES)]
    drawn = torch.empty(_DRAWN).normal_(0, _STD, generator=torch.Generator().manual_seed(0)).bfloat16()
    view = memoryview(drawn.view(torch.int16).numpy())
    with ThreadPoolExecutor(_NUM_FILES) as threads:
        for part in range(_NUM_FILES):
            threads.submit(_write_file, folder / names[part], parts[part], view, 7919 * 7919 * part)
    where = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Write the folder; one that is complete is left as it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    options = parser.parse_args()
    complete = options.folder / "complete"
    if not complete.exists():
        write_config(options.folder, options.shape)
        write_tokenizer(options.folder, SHAPES[options.shape]["vocab_size"])
        write_weights(options.folder)
        complete.touch()


if __name__ == "__main__":
    main()

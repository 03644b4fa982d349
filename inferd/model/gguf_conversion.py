"""The process that converts one GGUF file: `python -m inferd.model.gguf_conversion FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from inferd.model.gguf_tokenizer import mend


def convert(file: Path, folder: Path) -> None:
    """Write config, weights (dequantised, as stored otherwise), tokenizer and chat template of a GGUF file."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    mend(tokenizer, metadata(file))
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(folder)


def metadata(file: Path) -> dict[str, Any]:
    """What the file says of its tokenizer."""
    fields = GGUFReader(file).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.ggml")}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

"""Writes a model's tokenizer and chat template for the front. Runs where transformers is loaded anyway: the engine."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from inferd.text.tokenizer import CHAT_FILE, TOKENIZER_FILE
from pagepool.errors import invalid_field

_EXPORT_VERSION = 1
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def export_tokenizer(folder: Path, cache: Path) -> Path:
    """A folder below `cache` that `Tokenizer.load` reads, made with what transformers makes of the model's folder.

    Named after the contents of the model's small files, so that a changed tokenizer is exported anew; written beside
    and renamed, so that it is whole or not there. Raises INVALID_FIELD for --model if there is no fast tokenizer.
    """
    target = cache / "tokenizers" / _digest(folder)
    if (target / CHAT_FILE).exists():
        return target
    tokenizer = _load(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        tokenizer.backend_tokenizer.save(str(draft / TOKENIZER_FILE))
        chat = {"template": _template(tokenizer), "special_tokens": _special_tokens(tokenizer)}
        (draft / CHAT_FILE).write_text(json.dumps(chat))
        _publish(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def _publish(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        if not (target / CHAT_FILE).exists():  # else another worker was faster, with the same contents
            raise


def _digest(folder: Path) -> str:
    """Names what decides the export: the files beside the weights, and the version of transformers."""
    import transformers  # slow to import, and here only

    digest = hashlib.sha256(f"{_EXPORT_VERSION} {transformers.__version__}".encode())
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS:
            digest.update(os.fsencode(path.name) + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer  # slow to import, and here only

    remedy = "save the model's tokenizer into the folder, with a tokenizer.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise invalid_field("--model", folder, f"a folder with a tokenizer ({reason})", remedy) from error
    if not tokenizer.is_fast:
        raise invalid_field("--model", folder, "a folder with a fast tokenizer", remedy)
    return tokenizer


def _template(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:  # several templates and no default: none that a plain conversation could mean
        return None
    return template


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """What templates may name: bos_token and its like."""
    names: dict[str, Any] = {}
    for name, value in tokenizer.special_tokens_map.items():
        names[name] = [str(item) for item in value] if isinstance(value, list) else str(value)
    return names

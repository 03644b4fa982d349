"""Models are found, converted once for each content, digested by content, and otherwise refused with the way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from inferd.model import gguf, source
from inferd.model.digest import digest, file_digest
from inferd.model.load import load_model
from pagepool.errors import PagepoolError
from tests.cpu.model_configs import random_model

CACHE = source.DEFAULT_CACHE
"""The user's own cache: converting the default model takes a minute, once."""

TEXTS = (
    "1234567890",
    "in 2024,  3.14  and 1,000,000",
    "\tif x:\n\t\treturn 0\n",
    "one\r\ntwo\r\n\r\n",
    "three\n\n\nnewlines",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "ภาษาไทยไม่มีวรรค",
    "  leading and trailing  ",
    "it's they'll I'M",
    "naïve café ﬁ Ⅳ ½ ²",
    "日本語の文章。",
    "a\u00a0b\u200bc",
    "",
    " ",
    "\n",
    "{}[]()<>!=+-*/\\",
    "x" * 300,
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return source.resolve("smollm2", CACHE, lambda _: None)


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_made_from_gguf_gives_every_text_back(smollm2: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)

    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  12", ["a", "ĠĠ", "1", "2"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("x½", ["x", "Â½"]),
    ],
)
def test_its_digits_are_split_off_first_as_the_models_own_pre_tokeniser_does(
    smollm2: Path, text: str, tokens: list[str]
) -> None:
    assert AutoTokenizer.from_pretrained(smollm2).tokenize(text) == tokens


def test_its_control_tokens_and_chat_template_are_there(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)

    assert tokenizer.encode("<|im_start|><repo_name>") == [1, 3]
    assert "<|im_start|>user\nHi<|im_end|>" in chat


def write_model(folder: Path) -> Path:
    """A complete model folder, but for a tokenizer worth the name."""
    random_model("llama").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_complete_folder_is_itself(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")

    assert source.resolve(str(folder), tmp_path / "cache", print) == folder


@pytest.mark.parametrize(
    ("missing", "why"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no weights"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
def test_an_incomplete_folder_is_refused_with_what_is_missing(tmp_path: Path, missing: str, why: str) -> None:
    folder = write_model(tmp_path / "model")
    (folder / missing).unlink()

    with pytest.raises(PagepoolError, match=why) as refusal:
        source.resolve(str(folder), tmp_path, print)

    assert refusal.value.field == "--model"


@pytest.mark.parametrize("spec", ["./nowhere", "/no/such/model.gguf", "nowhere.gguf"])
def test_a_path_that_does_not_exist_is_refused(tmp_path: Path, spec: str) -> None:
    with pytest.raises(PagepoolError, match="no such file or folder"):
        source.resolve(spec, tmp_path, print)


def test_a_hub_id_out_of_reach_names_what_was_tried_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(PagepoolError, match="not in the hub cache") as refusal:
        source.resolve("nobody/such-a-model", tmp_path, print)

    assert "https://huggingface.co" in refusal.value.message
    assert "smollm2" in refusal.value.message


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGML")

    with pytest.raises(PagepoolError, match="is not a GGUF file"):
        source.resolve(str(file), tmp_path, print)


def test_a_gguf_file_that_cannot_be_read_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(64))

    with pytest.raises(PagepoolError, match="its conversion ended with 1"):
        source.resolve(str(file), tmp_path / "cache", print)

    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_gguf_file_replaced_under_its_name_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, told = tmp_path / "model.gguf", []
    monkeypatch.setattr(gguf, "_convert", lambda spec, path, draft, lock, tell: (draft.mkdir(), told.append(draft)))
    folders = []
    for content in (b"GGUF one", b"GGUF one", b"GGUF two"):
        file.write_bytes(content)
        folders.append(gguf.converted("model", file, tmp_path, print))

    assert folders[0] == folders[1] != folders[2]
    assert len(told) == 2


def test_the_digest_follows_the_weights_content_not_their_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before = digest(folder, tmp_path)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    assert len(before) == 32
    assert digest(folder, tmp_path) != before


def test_the_digest_does_not_depend_on_the_folders_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    before = digest(folder, tmp_path)
    folder.rename(tmp_path / "renamed")

    assert digest(tmp_path / "renamed", tmp_path) == before


def test_a_settled_file_is_not_read_twice_but_a_changed_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    monkeypatch.setattr("inferd.model.digest._SETTLED_NS", -1)
    first = file_digest(file, tmp_path)
    monkeypatch.setattr("hashlib.file_digest", None)  # reading again would fail

    assert file_digest(file, tmp_path) == first
    os.utime(file, ns=(1, 1))
    with pytest.raises(TypeError):
        file_digest(file, tmp_path)


def test_a_weight_that_the_files_lack_is_not_made_up(tmp_path: Path) -> None:
    model = random_model("llama")
    state = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)

    with pytest.raises(PagepoolError, match=r"lack 1 weights, the first being model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tmp_path, dtype="float32", tell=print)


def test_a_served_model_knows_what_the_engine_asks(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    served = load_model(tmp_path, name="mine", dtype="bfloat16", tell=print)

    assert (served.name, served.architecture, served.dtype) == ("mine", "LlamaForCausalLM", "bfloat16")
    assert (served.max_context, served.vocab_size, served.eos_token_ids) == (256, 199, (2,))
    assert served.model.dtype is torch.bfloat16
    assert served.layout(16).format.name == "BF16"

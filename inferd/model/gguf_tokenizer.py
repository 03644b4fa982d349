r"""Makes a tokenizer that transformers built from a GGUF file split text as the model's own tokenizer does.

A GGUF file names its pre-tokeniser (`tokenizer.ggml.pre`), but transformers builds one by architecture: SmolLM2, a
Llama by architecture, would not split digits before the rest. The names and their expressions are llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerBase

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LLAMA3, _QWEN2 = (_WORDS % r"\p{N}{1,3}",), (_WORDS % r"\p{N}",)
_DIGITS = (r"\p{N}", _GPT2)

_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "gigachat", "roberta-bpe", "bert-bge"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-bpe", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "pixtral", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "chatglm-bpe"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "gpt-4o": (_CASED % (_SHORT, _SHORT, r"\p{N}{1,3}"),),
    "llama4": (_CASED % (_SHORT, _SHORT, r"\p{N}{1,3}"),),
    "tekken": (_CASED % ("", "", r"\p{N}"),),
}


def mend(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]) -> None:
    """Bring a fast tokenizer in line with the GGUF file's own words; changes it in place.

    Byte-level BPE gets the pre-tokeniser that the file names, if it is a known one; control tokens become special
    tokens, user-defined ones are never split.
    """
    splits = _SPLITS.get(metadata.get("tokenizer.ggml.pre", ""))
    if metadata.get("tokenizer.ggml.model") == "gpt2" and splits is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = tokenizer.added_tokens_decoder
    kinds = zip(metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    missing = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for index, (token, kind) in enumerate(kinds)
        if kind in (CONTROL, USER_DEFINED) and index not in known
    ]
    tokenizer.add_tokens([token for token in missing if not token.special])
    tokenizer.add_tokens([token for token in missing if token.special], special_tokens=True)

"""Streams of tokens as text, against the decoders of the tokenizers library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from inferd.text.detokenizer import ByteDetokenizer, Spelling, WindowDetokenizer
from inferd.text.tokenizer import Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, 東京 and Ωmega", "  two  spaces\n\nlines\t"] * 3


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def sentence_piece() -> Backend:
    """Llama's pipeline: a mark for the space, one put before the text, bytes for what the vocabulary lacks."""
    words = {"<unk>", "<s>", "</s>"}
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz", "é", "東"]
    vocab = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", *pieces, "▁t", "he", "▁the"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(sorted(words))
    return backend


def metaspace() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, special_tokens=["<s>"]))
    return backend


def word_piece() -> Backend:
    vocab = {
        word: number for number, word in enumerate(["[UNK]", "[SEP]", "run", "##ning", "##s", "the", "dog", ",", "."])
    }
    backend = Backend(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return backend


BACKENDS = {maker.__name__: maker() for maker in (byte_level, sentence_piece, metaspace, word_piece)}
names = pytest.mark.parametrize("name", BACKENDS)


def pieces_of(backend: Backend, ids: list[int]) -> list[str]:
    stream = Tokenizer(backend, None).detokenizer(())
    return [*(stream.feed([token]) for token in ids), stream.flush()]


@names
@given(text=st.text(alphabet="the dog, runs.東é🦊\n", max_size=40))
def test_pieces_of_any_text_join_to_what_decoding_all_at_once_gives(name: str, text: str) -> None:
    backend = BACKENDS[name]
    ids = backend.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(backend, ids)) == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_what_decoding_all_at_once_gives(name: str, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=30))
    assert "".join(pieces_of(backend, ids)) == backend.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet="the é東🦊 ", max_size=20), cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30))
def test_how_tokens_are_grouped_changes_nothing(text: str, cuts: list[int]) -> None:
    backend = BACKENDS["sentence_piece"]
    ids = backend.encode(text, add_special_tokens=False).ids
    stream, at, shown = Tokenizer(backend, None).detokenizer(()), 0, ""
    for cut in cuts:
        shown, at = shown + stream.feed(ids[at : at + cut]), at + cut
    assert shown + stream.feed(ids[at:]) + stream.flush() == text


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
def test_a_character_of_four_bytes_comes_whole_with_its_last_token(name: str) -> None:
    backend = BACKENDS[name]
    ids = backend.encode("🦊", add_special_tokens=False).ids
    pieces = [piece for piece in pieces_of(backend, ids) if piece]
    assert len(ids) >= 4
    assert pieces == ["🦊"]


def test_half_a_character_at_the_end_becomes_one_replacement_character() -> None:
    backend = BACKENDS["byte_level"]
    ids = backend.encode("a🦊", add_special_tokens=False).ids
    assert pieces_of(backend, ids[:-1])[-1] == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_character_do_not_hold_back_what_follows() -> None:
    backend = BACKENDS["sentence_piece"]
    ids = [backend.token_to_id(token) for token in ("<0xE6>", "<0x9D>", "a", "<0xFF>", "b")]
    pieces = pieces_of(backend, ids)
    assert "".join(pieces) == "\ufffda\ufffdb"
    assert pieces[2] == "\ufffda", "the broken character is given up as soon as it cannot be one any more"


def test_a_continuation_keeps_its_leading_space_and_a_beginning_does_not() -> None:
    backend = BACKENDS["sentence_piece"]
    tokenizer = Tokenizer(backend, None)
    the, start = backend.token_to_id("▁the"), backend.token_to_id("<s>")
    assert tokenizer.detokenizer([start]).feed([the]) == "the"
    assert tokenizer.detokenizer([start, the]).feed([the]) == " the"


@names
def test_special_tokens_leave_no_trace_in_a_stream(name: str) -> None:
    backend = BACKENDS[name]
    special = next(number for number, token in backend.get_added_tokens_decoder().items() if token.special)
    ids = backend.encode("the dog", add_special_tokens=False).ids
    mixed = [special, *(token for pair in zip(ids, [special] * len(ids), strict=True) for token in pair)]
    assert "".join(pieces_of(backend, mixed)) == "".join(pieces_of(backend, ids))


def test_the_kind_of_decoder_decides_how_a_stream_is_decoded() -> None:
    kinds = {name: type(Tokenizer(backend, None).detokenizer(())) for name, backend in BACKENDS.items()}
    assert kinds.pop("word_piece") is WindowDetokenizer
    assert set(kinds.values()) == {ByteDetokenizer}
    assert Spelling.of(BACKENDS["word_piece"]) is None


def test_ids_without_a_token_have_no_text() -> None:
    assert Tokenizer(BACKENDS["byte_level"], None).decode([100_000]) == ""

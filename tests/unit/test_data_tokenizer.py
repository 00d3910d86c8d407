"""Tokenizers: bytes are kept, specials are not made by text, files of others are read."""

import codecs
import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import decoders, models, normalizers, pre_tokenizers

from alcoda.config import validate
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Bpe, Byte, File, TokenizerConfig
from alcoda.errors import UsageError

TEXT = "The quick brown fox; it's 1,234 jumps over\n\n\tdef lazy(dog): return dog\r\n"
BYTE = Byte().build()
BPE = Bpe(vocab_size=300, min_frequency=1).build([TEXT * 5, "naïve 😀 café <|endoftext|>"])
EXACT = pytest.mark.parametrize("tokenizer", [BYTE, BPE], ids=["byte", "bpe"])
TRICKY = st.lists(
    st.sampled_from(["a", " ", "\n", "\r\n", "\0", "é", "😀", "👩\u200d👧", "<|endoftext|>", "▁", "the "])
).map("".join)


@EXACT
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(st.characters(exclude_categories=["Cs"])), TRICKY))
def test_every_byte_is_accounted_for(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.eot not in ids
    assert tokenizer.decode_bytes(ids) == text.encode() and tokenizer.decode(ids) == text
    assert tokenizer.token_bytes_V[ids].sum() == len(text.encode())


def test_byte_ids_are_the_bytes_plus_one():
    text = "aé😀\0\r\n"
    assert BYTE.encode(text).tolist() == [1 + byte for byte in text.encode()]
    assert (BYTE.vocab_size, BYTE.eot, BYTE.eot_text) == (257, 0, "<|endoftext|>")
    assert BYTE.token_bytes_V.tolist() == [0] + [1] * 256


def test_bpe_is_trained_deterministically_to_the_size_asked_for():
    assert (BPE.vocab_size, BPE.eot, BPE.token_bytes_V[0]) == (300, 0, 0)
    again = Bpe(vocab_size=300, min_frequency=1).build([TEXT * 5, "naïve 😀 café <|endoftext|>"])
    other = Bpe(vocab_size=300, min_frequency=1).build([TEXT[::-1] * 5])
    assert again.sha256 == BPE.sha256 != other.sha256
    assert len(BPE.encode(TEXT)) < len(BYTE.encode(TEXT)) / 2
    assert Bpe(vocab_size=5000).build([TEXT]).vocab_size < 300  # there is nothing more to merge


def test_bpe_min_frequency():
    text = ["abab"] * 2
    assert Bpe(min_frequency=5).build(text).vocab_size == 257 < Bpe(min_frequency=2).build(text).vocab_size


def test_specials_stand_for_nothing_and_other_ids_are_refused():
    assert BPE.decode([0, *BPE.encode("a"), 0]) == "a"
    for bad in (-1, 300):
        with pytest.raises(UsageError, match=f"token {bad} is not one of the tokenizer's 300"):
            BPE.decode([bad])


def test_decode_bytes_streams():
    text, decoder = "caffè 😀", codecs.getincrementaldecoder("utf-8")()
    assert "".join(decoder.decode(BYTE.decode_bytes([i])) for i in BYTE.encode(text)) == text
    assert BYTE.decode(BYTE.encode("é")[:1]) == "\ufffd"


def test_encode_batch_is_encode_of_each():
    texts = ["", "a b", TEXT, "😀"]
    for one, text in zip(BPE.encode_batch(texts), texts, strict=True):
        assert one.tolist() == BPE.encode(text).tolist()
    assert BPE.encode_batch([]) == []


@pytest.mark.parametrize("unit", ["the quick brown fox, and\nlazy dog\n\n ", "x", "漢字。", " ", "a  b "])
def test_long_texts_are_encoded_in_pieces_without_a_difference(monkeypatch, unit):
    text = unit * (400 // len(unit))
    whole = BPE.encode(text)
    monkeypatch.setattr("alcoda.data.tokenizer._PIECE_CHARS", 64)
    monkeypatch.setattr("alcoda.data.tokenizer._GROUP_CHARS", 100)
    pieces = BPE.encode_batch(["first", text, "last"])
    assert BPE.decode(pieces[1]) == text and BPE.decode(pieces[2]) == "last"
    if "fox" in unit:
        assert pieces[1].tolist() == whole.tolist()


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UsageError, match="surrogate"):
        BYTE.encode("a\ud800")


@EXACT
def test_save_and_load(tokenizer, tmp_path):
    path = tmp_path / "new" / "tokenizer.json"
    tokenizer.save(path)
    for place in (path, path.parent, str(path)):
        loaded = Tokenizer.load(place)
        assert loaded.sha256 == tokenizer.sha256 and loaded.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
        assert loaded.eot not in loaded.encode("a<|endoftext|>b")
    assert [entry.name for entry in path.parent.iterdir()] == ["tokenizer.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        BYTE.save(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def write(inner, path, **changes):
    layout = json.loads(inner.to_str()) | changes
    path.write_text(json.dumps(layout))
    return path


def unigram(eot="</s>"):
    pieces = [("<unk>", -9.0), (eot, 0.0)] + [(piece, -2.0) for piece in ("▁", "▁a", "a", "b", "<", "/", "s", ">")]
    inner = tokenizers.Tokenizer(models.Unigram(pieces, 0, False))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens([eot])
    return inner


def test_a_sentencepiece_tokenizer_counts_what_is_decoded(tmp_path):
    tokenizer = Tokenizer.load(write(unigram(), tmp_path / "t.json"))
    assert tokenizer.eot_text == "</s>" and not tokenizer.exact
    ids = tokenizer.encode("a b")
    assert tokenizer.decode(ids) == "a b" and tokenizer.decode_bytes(ids) == b" a b"
    # A Unigram model finds its special in the text: it is cut so that it does not.
    for text in ("a</s>b", "</s>", "</s></s>a"):
        assert tokenizer.eot not in tokenizer.encode(text), text
    assert tokenizer.decode(tokenizer.encode("</s>")).replace(" ", "") == "</s>"


def test_byte_fallback_tokens_are_one_byte(tmp_path):
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["</s>"])
    tokenizer = Tokenizer.load(write(inner, tmp_path / "t.json"))
    ids = tokenizer.encode("a 😀")
    assert tokenizer.decode_bytes(ids) == " a 😀".encode() and tokenizer.decode(ids) == "a 😀"


def test_what_a_file_may_set_does_not_change_the_ids(tmp_path):
    inner = tokenizers.Tokenizer.from_str(BPE._inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    inner.post_processor = tokenizers.processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    path = write(inner, tmp_path / "t.json")
    layout = json.loads(path.read_text())
    layout["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(layout))
    loaded = Tokenizer.load(path)
    text = TEXT + "<|endoftext|>"
    assert loaded.encode(text).tolist() == BPE.encode(text).tolist() and loaded.token_bytes_V[0] == 0


def test_added_tokens_that_are_not_special_stand_for_their_text(tmp_path):
    inner = tokenizers.Tokenizer.from_str(BPE._inner.to_str())
    inner.add_tokens(["    é"])
    loaded = Tokenizer.load(write(inner, tmp_path / "t.json"))
    ids = loaded.encode("x    éy")
    assert 300 in ids and loaded.decode_bytes(ids) == "x    éy".encode() and loaded.vocab_size == 301


def word_level(path, unk="[UNK]"):
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "fox": 2, "the": 3}, unk))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer.load(write(inner, path))


def test_an_unknown_token_stands_for_no_known_number_of_bytes(tmp_path):
    tokenizer = word_level(tmp_path / "words.json")
    assert tokenizer.encode("the antidisestablishmentarian fox").tolist() == [3, 0, 2]
    assert tokenizer.unk == 0 and tokenizer.token_bytes_V.tolist()[::2] == [0, len(" fox")]
    assert Tokenizer.load(write(unigram(), tmp_path / "unigram.json")).unk == 0
    assert BYTE.unk is None and BPE.unk is None
    assert Tokenizer.load(write(tokenizers.Tokenizer(models.BPE({"</s>": 0}, [])), tmp_path / "none.json")).unk is None


def test_which_token_ends_a_text(tmp_path):
    path = write(unigram("[END]"), tmp_path / "t.json")
    with pytest.raises(UsageError, match=r"none of the end-of-text tokens .*name its own with eot.*: \[END\]"):
        Tokenizer.load(path)
    with pytest.raises(UsageError, match=r"no token '\[STOP\]'; Its special tokens: \[END\]"):
        Tokenizer.load(path, "[STOP]")
    assert Tokenizer.load(path, "[END]").eot == 1
    assert File(path=str(path), eot="[END]").build().kind == "file"
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
    with pytest.raises(UsageError, match="It has no special tokens"):
        Tokenizer.load(write(plain, path))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\x00 sentencepiece", b'{"a": 1}'])
def test_files_that_are_no_tokenizer(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer.model is no tokenizer.json .*SentencePiece"):
        Tokenizer.load(path)
    with pytest.raises(UsageError, match="there is no file"):
        Tokenizer.load(tmp_path)


def test_config_of_the_axis():
    assert TokenizerConfig.parse("byte") == Byte() and TokenizerConfig.parse({"kind": "bpe", "vocab_size": 300}).trained
    assert set(TokenizerConfig.choices) == {"byte", "bpe", "file", "none"}
    with pytest.raises(ValidationError, match="at least 257 tokens"):
        Bpe(vocab_size=256)
    with pytest.raises(UsageError, match="path: field required"):
        validate(File, {"kind": "file"})


DATA = os.environ.get("ALCODA_DATA")


@pytest.mark.skipif(not DATA, reason="ALCODA_DATA is unset")
@pytest.mark.parametrize("name", ["gpt2", "bpe4k_children_classics.json"])
def test_real_tokenizers(name):
    tokenizer = Tokenizer.load(Path(DATA or "", "data", "tokenizers", name))
    assert tokenizer.vocab_size == {"gpt2": 50257}.get(name, 4096) and tokenizer.eot_text == "<|endoftext|>"
    text = TEXT + "é😀\0<|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode_bytes(ids) == text.encode() and tokenizer.eot not in ids
    assert tokenizer.token_bytes_V[ids].sum() == len(text.encode())

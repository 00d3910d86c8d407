"""The token cache: what is stored, and that nothing half-written is ever found there."""

import errno
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from alcoda.data import cache
from alcoda.data.cache import cache_root, tokenise
from alcoda.data.corpora import corpus
from alcoda.data.splits import whole
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Byte
from alcoda.errors import RunError, UsageError

BYTE = Byte().build()
WIDE = 70_000


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "books.txt"
    path.write_text("ab\n<|endoftext|>\né<|endoftext|>\n<|endoftext|>\n \n<|endoftext|>\nz", encoding="utf-8")
    return corpus(f"text:{path}")


def entries(root):
    return sorted(path.name for path in (root / "tokens").iterdir())


def check(store):
    assert store.tokens.tolist() == [0, *(1 + b for b in b"ab\n"), 0, *BYTE.encode("é<|endoftext|>\n"), 0, 1 + ord("z")]
    assert store.offsets.tolist() == [0, 4, 21, 23] and store.doc_bytes.tolist() == [3, 16, 1]
    assert (store.tokens.dtype, store.name) == (np.uint16, "books")


def test_each_document_is_eot_and_its_tokens(text, root, monkeypatch):
    monkeypatch.setattr(cache, "_BATCH_BYTES", 4)
    monkeypatch.setattr(cache, "_BLOCK_TOKENS", 2)
    batches, encode_batch = [], Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, texts: batches.append(texts) or encode_batch(self, texts)
    )
    store = tokenise(text, BYTE)
    assert [len(batch) for batch in batches] == [2, 1]  # a large corpus is never held whole
    check(store)
    assert store.notes == () and len(entries(root)) == 1
    assert sorted(path.name for path in (root / "tokens" / entries(root)[0]).iterdir()) == [
        "doc_bytes.npy",
        "doc_hashes.npy",
        "meta.json",
        "offsets.npy",
        "tokens.bin",
    ]
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 1


def test_the_second_time_nothing_is_tokenised(text, monkeypatch):
    tokenise(text, BYTE)
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode_batch", None)
        store = tokenise(text, BYTE)
    check(store)


def test_another_content_tokenizer_or_limit_is_another_entry(text, root, tmp_path):
    tokenise(text, BYTE)
    assert tokenise(text, BYTE, max_bytes=4).doc_bytes.tolist() == [3]
    other = BYTE._inner.from_str(BYTE._inner.to_str())
    other.add_tokens(["é<"])
    assert len(tokenise(text, Tokenizer(other, "<|endoftext|>", "file")).tokens) == 21
    text.path.write_text("other")
    assert len(tokenise(text, BYTE).tokens) == 6 and len(entries(root)) == 4


def test_large_vocabularies_take_four_bytes(text):
    text.path.write_text("a long one")
    layout = json.loads(BYTE._inner.to_str())
    layout["model"]["vocab"] |= {f"x{i}": i for i in range(257, WIDE)}
    layout["added_tokens"].append(layout["added_tokens"][0] | {"id": WIDE, "content": "long", "special": False})
    store = tokenise(text, Tokenizer(BYTE._inner.from_str(json.dumps(layout)), "<|endoftext|>", "file"))
    assert store.tokens.dtype == np.uint32 and store.tokens.tolist().count(WIDE) == 1


@pytest.mark.parametrize(
    "harm",
    [
        lambda entry: os.truncate(entry / "tokens.bin", 10),
        lambda entry: (entry / "tokens.bin").write_bytes(bytes(100)),
        lambda entry: (entry / "meta.json").write_text("{"),
        lambda entry: (entry / "meta.json").unlink(),
        lambda entry: os.truncate(entry / "offsets.npy", 5),
        lambda entry: np.save(entry / "doc_bytes.npy", np.zeros(3, np.int64)),
        lambda entry: (entry / "doc_hashes.npy").unlink(),
    ],
)
def test_a_damaged_entry_is_written_anew_with_a_note(text, root, harm):
    tokenise(text, BYTE)
    harm(root / "tokens" / entries(root)[0])
    store = tokenise(text, BYTE)
    check(store)
    assert "books" in store.notes[0] and "damaged" in store.notes[0] and len(entries(root)) == 1
    assert tokenise(text, BYTE).notes == ()


@pytest.mark.parametrize("where", ["encode_batch", "rename"])
def test_ctrl_c_leaves_nothing(text, root, monkeypatch, where):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*{"encode_batch": (Tokenizer, "encode_batch"), "rename": (os, "rename")}[where], interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenise(text, BYTE)
    assert entries(root) == []
    check(tokenise(text, BYTE))


def test_a_bad_corpus_leaves_nothing(tmp_path, root):
    (tmp_path / "bad.txt").write_bytes(b"fine\n<|endoftext|>\n\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        tokenise(corpus(f"text:{tmp_path / 'bad.txt'}"), BYTE)
    assert entries(root) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_which_and_how_much(text, root, monkeypatch, number):
    def full(descriptor):
        raise OSError(number, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError) as caught:
        tokenise(text, BYTE)
    message = str(caught.value)
    assert f"no space left on the disk of {root}" in message and "ALCODA_CACHE" in message
    needed = int(message.split("it needs about ")[1].split(" ")[0].replace(",", ""))
    assert 23 * 2 <= needed <= 23 * 2 * 4  # 23 tokens; the file has more bytes than its documents
    assert "are free" in message and entries(root) == []


def test_a_full_disk_while_the_small_files_are_written(text, root, monkeypatch):
    def full(path, array):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(RunError, match=r"no space left on the disk of .* for the tokens of books: .* are free"):
        tokenise(text, BYTE)
    assert entries(root) == []


def test_a_cache_that_cannot_be_written(text, root, monkeypatch):
    root.write_text("a file")
    with pytest.raises(UsageError, match=r"the cache .* cannot be written .*; set ALCODA_CACHE"):
        tokenise(text, BYTE)
    monkeypatch.setenv("ALCODA_CACHE", str(root / "below"))
    with pytest.raises(UsageError, match=r"the cache .* cannot be written .*; set ALCODA_CACHE"):
        tokenise(text, BYTE)


def test_a_corpus_that_vanishes_while_it_is_read(text, root, monkeypatch):
    def vanish(corpus):
        corpus.path.unlink()
        return "0" * 64

    monkeypatch.setattr(type(text), "content_hash", vanish)
    with pytest.raises(RunError, match=r"books: .*No such file"):
        tokenise(text, BYTE)


def test_a_process_that_finished_first_is_no_trouble(text, root, monkeypatch):
    write, stores = cache._write, []

    def write_twice(*args):
        monkeypatch.setattr(cache, "_write", write)
        stores.append(tokenise(text, BYTE))  # the other process, from beginning to end
        write(*args)

    monkeypatch.setattr(cache, "_write", write_twice)
    check(tokenise(text, BYTE))
    check(stores[0])  # its map is still open though its folder was replaced
    assert len(entries(root)) == 1


def test_two_processes_at_once(text, root):
    code = (
        "import sys; from alcoda.data import tokenise, corpus; from alcoda.data.vocabulary import Byte;"
        "print(len(tokenise(corpus(sys.argv[1]), Byte().build()).tokens))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, text.spec], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == [b"23\n", b"23\n"]
    assert len(entries(root)) == 1


def test_what_a_killed_process_left_goes_after_a_day(text, root):
    for name, age_s in {"old": 100_000, "new": 100}.items():
        folder = root / "tokens" / f".0123-{name}"
        folder.mkdir(parents=True)
        (folder / "tokens.bin").touch()
        for path in (folder / "tokens.bin", folder):
            os.utime(path, (time.time() - age_s,) * 2)
    tokenise(text, BYTE)
    assert [name for name in entries(root) if name.startswith(".")] == [".0123-new"]


def test_bin_files_are_cut_by_bytes_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_BLOCK_TOKENS", 2)
    np.array([66, 67, 68, 0, 69, 0, 70], "<u2").tofile(tmp_path / "a.bin")
    one = corpus(f"bin:{tmp_path / 'a.bin'}")
    store = tokenise(one, BYTE)
    assert store.tokens.tolist() == [0, 66, 67, 68, 0, 69, 0, 70] and store.doc_bytes.tolist() == [3, 1, 1]
    for n, tokens in {1: [0, 66], 3: [0, 66, 67, 68], 4: [0, 66, 67, 68, 0, 69]}.items():
        assert tokenise(one, BYTE, n).tokens.tolist() == tokens, n
    other = BYTE._inner.from_str(BYTE._inner.to_str())
    other.add_tokens(["long"])
    np.array([257], "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(UsageError, match=r"max_bytes \(1\) is less than its first token"):
        tokenise(corpus(one.spec), Tokenizer(other, "<|endoftext|>", "file"), 1)


def test_hashes_are_equal_for_documents_of_the_same_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_BLOCK_TOKENS", 2)
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo\n<|endoftext|>\none\n<|endoftext|>\noneone\n")
    hashes = tokenise(corpus(f"text:{tmp_path / 'a.txt'}"), BYTE).doc_hashes
    assert hashes.dtype == np.uint64 and hashes[0] == hashes[2] and len(set(hashes.tolist())) == 3


def test_text_that_the_tokenizer_does_not_know_is_noted(text):
    inner = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "ab": 2}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = Tokenizer(inner, "</s>", "file")
    for _ in range(2):  # written, and found
        store = tokenise(text, words)
        # EOT ab, EOT é <| endoftext |>, EOT z
        assert store.tokens.tolist() == [1, 2, 1, 0, 0, 0, 0, 1, 0] and not store.token_bytes_V[0]
        (note,) = store.notes
        assert note.startswith("books: 55.6% of the tokens are unknown to the tokenizer: bits per byte leaves")
        assert whole(store).notes == store.notes


def test_where_the_cache_is(monkeypatch, root):
    assert cache_root() == root
    monkeypatch.delenv("ALCODA_CACHE")
    assert cache_root().parts[-2:] == (".cache", "alcoda")

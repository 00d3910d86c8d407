"""From a config to data: splits by document, a tokenizer that never saw the rest, names, notes, errors."""

import json
import re
import subprocess
import sys
import time
from itertools import chain

import numpy as np
import pytest

from alcoda.config import validate
from alcoda.data import Batches, DataConfig, Source, Splits, open_corpus, prepare
from alcoda.data.prepare import _short_runs
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Bpe, Byte, File
from alcoda.errors import UsageError

PARTS = ("train", "valid", "calib", "probe")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def books(tmp_path):
    """60 documents, each with a word of its own."""
    path = tmp_path / "books.txt"
    path.write_text("".join(f"w{i:03d} said the fox, and w{i:03d} again\n<|endoftext|>\n" for i in range(60)))
    return path


def config_of(path, **kwargs):
    return DataConfig(corpus=f"text:{path}", **({"tokenizer": Byte()} | kwargs))


def texts(data, part):
    return [data.tokenizer.decode(doc) for stream in data.split(part).values() for doc in stream.documents()]


def test_every_document_is_in_one_split(books):
    data = prepare(config_of(books))
    whole = [text for part in PARTS for text in texts(data, part)]
    assert sorted(whole) == sorted(part for part in books.read_text().split("<|endoftext|>\n") if part)
    assert data.notes == () and list(data.split("valid")) == ["books"]
    assert data.split("train")["books"].name == "books/train"


def test_splits_are_the_same_text_for_every_tokenizer(books):
    a, b = (prepare(config_of(books, tokenizer=tokenizer)) for tokenizer in (Byte(), Bpe(vocab_size=300)))
    assert all(texts(a, part) == texts(b, part) for part in PARTS)
    assert sorted(texts(a, "valid")) != sorted(texts(prepare(config_of(books, seed=1)), "valid"))


def seen_of(seen, documents):
    seen += documents
    return seen


def trained_on(config, monkeypatch):
    seen, build = [], Bpe.build
    with monkeypatch.context() as patch:
        patch.setattr(Bpe, "build", lambda self, documents: build(self, seen_of(seen, documents)))
        return prepare(config), seen


def test_the_tokenizer_is_trained_on_the_train_split_only(books, monkeypatch):
    data, seen = trained_on(config_of(books, tokenizer=Bpe(vocab_size=300)), monkeypatch)
    assert sorted(seen) == sorted(texts(data, "train")) and len(seen) < 60


def test_a_corpus_of_one_document_trains_the_tokenizer_on_its_first_part(tmp_path, monkeypatch):
    path = tmp_path / "one.txt"
    text = "".join(f"é{i} " for i in range(500))
    path.write_text(text, encoding="utf-8")
    data, seen = trained_on(config_of(path, tokenizer=Bpe(vocab_size=300)), monkeypatch)
    (train,), (valid,) = data.split("train").values(), data.split("valid").values()
    note = data.notes[-1]
    assert "one has 1 document" in note and "consecutive parts" in note
    assert text.startswith(seen[0]) and len(seen) == 1
    # valid begins at or behind the end of what the tokenizer saw
    assert len(seen[0].encode()) <= train.n_bytes <= len(seen[0].encode()) + 8
    assert train.n_bytes + sum(data.split(part)["one"].n_bytes for part in PARTS[1:]) == len(text.encode())
    assert valid.n_tokens > 10


def test_train_bytes_and_weights_decide_what_the_tokenizer_sees(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text("".join(f"{name}{i:04d}\n<|endoftext|>\n" for i in range(400)))
    mix = (Source(corpus=f"text:{tmp_path}/a", weight=3), Source(corpus=f"text:{tmp_path}/b", weight=1))
    _, seen = trained_on(DataConfig(mix=mix, tokenizer=Bpe(vocab_size=300, train_bytes=1200)), monkeypatch)
    of_a, of_b = (sum(len(text) for text in seen if text[0] == name) for name in "ab")
    assert 600 <= of_a <= 900 and 150 <= of_b <= 300
    numbers = [int(text[1:5]) for text in seen if text[0] == "a" and len(text) == 6]
    assert max(numbers) > 300 and min(numbers) < 100  # from all over the corpus


def test_train_bytes_of_few_documents(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("".join(f"{i:02d}{'x' * 96}\n<|endoftext|>\n" for i in range(30)))
    _, seen = trained_on(config_of(tmp_path / "a.txt", tokenizer=Bpe(vocab_size=300, train_bytes=500)), monkeypatch)
    assert 400 <= sum(map(len, seen)) <= 500 and len(seen) > 20


def test_the_second_time_nothing_is_trained_or_read(books, root, monkeypatch):
    config = config_of(books, tokenizer=Bpe(vocab_size=300))
    first = prepare(config)
    with monkeypatch.context() as patch:
        patch.setattr(Bpe, "build", None)
        patch.setattr(Tokenizer, "encode_batch", None)
        patch.setattr("alcoda.data.corpora.Text._documents", None)
        second = prepare(config)
    assert first.describe() == second.describe()
    (saved,) = (root / "tokenizers").iterdir()
    saved.write_text("{")
    assert prepare(config).tokenizer.sha256 == first.tokenizer.sha256  # a damaged one is trained anew
    assert Tokenizer.load(saved).sha256 == first.tokenizer.sha256


def test_whatever_changes_the_tokenizer_trains_another(books, root):
    base = {"tokenizer": Bpe(vocab_size=300)}
    for change in (
        {},
        {"seed": 1},
        {"max_bytes": 1500},
        {"splits": Splits(valid=0.2)},
        {"tokenizer": Bpe(vocab_size=290)},
    ):
        prepare(config_of(books, **(base | change)))
    assert len(list((root / "tokenizers").iterdir())) == 5


def test_a_small_vocabulary_is_noted(books):
    data = prepare(config_of(books, tokenizer=Bpe()))
    assert f"only {data.tokenizer.vocab_size} of the 4096 tokens asked" in data.notes[0]


def test_a_given_tokenizer_takes_the_place_of_the_configs(books, monkeypatch):
    monkeypatch.setattr(Bpe, "build", None)
    data = prepare(config_of(books, tokenizer=Bpe()), Byte().build())
    assert data.tokenizer.kind == "byte" and data.notes == ()


def test_a_valid_corpus_of_its_own(books, tmp_path):
    (tmp_path / "held.txt").write_text("never trained on")
    data = prepare(config_of(books, valid=f"text:{tmp_path}/held.txt"))
    assert texts(data, "valid") == ["never trained on"] and list(data.split("valid")) == ["held"]
    assert list(data.sources[0].splits) == ["train", "calib", "probe"]
    assert len(texts(data, "train")) + len(texts(data, "calib")) + len(texts(data, "probe")) == 60
    assert [source["name"] for source in data.describe()["sources"]] == ["books", "held"]


def test_a_valid_corpus_that_is_trained_on_is_refused(books, tmp_path):
    (tmp_path / "copy.txt").write_text(books.read_text())
    with pytest.raises(UsageError, match=r"valid: 'text:.*copy.txt' is trained on too"):
        prepare(config_of(books, valid=f"text:{tmp_path}/copy.txt"))


def test_text_that_is_in_two_sources_is_refused(books, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "copy.txt").write_text(books.read_text())
    for name in "12":
        (folder / f"{name}.txt").write_text("".join(f"{name}{i}\n<|endoftext|>\n" for i in range(40)))
    (tmp_path / "link.txt").symlink_to(folder / "1.txt")
    same = {"corpus": f"text:{books}", "name": "b"}
    for mix, says in (
        ([{"corpus": f"text:{books}", "max_bytes": 1000, "name": "a"}, same], r"books.txt' and .*books.txt is in both"),
        ([f"text:{tmp_path}/copy.txt", same], r"copy.txt' and 'text:.*books.txt' overlap \(they hold the same\)"),
        ([f"text:{folder}", f"text:{tmp_path}/link.txt"], r"folder' and 'text:.*link.txt' .*1.txt is in both"),
    ):
        with pytest.raises(UsageError, match=f"^mix: .*{says}.*name the text once"):
            prepare(validate(DataConfig, {"mix": mix, "tokenizer": "byte"}))
    for held in (folder / "1.txt", tmp_path / "link.txt"):
        with pytest.raises(UsageError, match=r"valid: .* is trained on too, as 'text:.*folder' \(.*1.txt is in both"):
            prepare(config_of(folder, valid=f"text:{held}"))


def test_validation_documents_that_are_trained_on_too_are_counted(books, tmp_path):
    held = texts(prepare(config_of(books)), "valid")
    # All of another source, and its valid part is in no other: those of books are repeated.
    (tmp_path / "more.txt").write_text("<|endoftext|>\n".join([*held, *(f"more {i}\n" for i in range(200))]))
    mix = DataConfig(mix=[f"text:{books}", f"text:{tmp_path}/more.txt"], tokenizer=Byte())
    data = prepare(mix)
    trained = set(texts(data, "train"))
    n, of = sum(text in trained for text in texts(data, "valid")), len(texts(data, "valid"))
    assert n and f"{n} of {of} validation documents are also in the training text, word for word" in data.notes[0]
    assert prepare(mix).notes == data.notes  # from the cache
    (tmp_path / "held.txt").write_text("<|endoftext|>\n".join([texts(data, "train")[0], "new"]))
    (note,) = prepare(config_of(books, valid=f"text:{tmp_path}/held.txt")).notes
    assert note.startswith("1 of 2 validation documents")


def test_a_document_that_is_cut_in_two_is_not_counted(tmp_path):
    (tmp_path / "few.txt").write_text("<|endoftext|>\n".join(["x" * 99 + "\n"] * 3))
    (note,) = prepare(config_of(tmp_path / "few.txt")).notes
    assert "consecutive parts" in note


def test_a_very_long_word_does_not_hold_up_the_training_of_a_tokenizer(tmp_path, monkeypatch):
    text = "x" * 200_000 + "\n" + "a word " * 300 + " " * 2500 + "é" * 1001
    (tmp_path / "long.txt").write_text(text)
    started = time.monotonic()
    config = config_of(tmp_path / "long.txt", tokenizer=Bpe(vocab_size=300))
    data, seen = trained_on(config, monkeypatch)
    assert time.monotonic() - started < 5
    assert data.tokenizer.vocab_size <= 300 and text.startswith("".join(seen))
    pieces = list(_short_runs(text))
    assert (
        "".join(pieces) == text and max(len(run) for piece in pieces for run in re.findall(r"\S+|\s+", piece)) == 1000
    )
    assert list(_short_runs("x" * 1000 + " " * 1000 + "y")) == ["x" * 1000 + " " * 1000 + "y"]


def test_mixes_and_their_names(books, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "books.txt").write_text("".join(f"b{i}\n<|endoftext|>\n" for i in range(90)))
    spec = f"text:{tmp_path}/b/books.txt"
    (tmp_path / "other.txt").write_text("".join(f"o{i}\n<|endoftext|>\n" for i in range(90)))
    other = {"corpus": f"text:{tmp_path}/other.txt", "name": "mine"}
    mix = ({"corpus": f"text:{books}", "weight": 2, "max_bytes": 1000}, spec, other)
    data = prepare(validate(DataConfig, {"mix": mix, "tokenizer": "byte", "mix_unit": "document"}))
    assert [source.name for source in data.sources] == ["books", "books-2", "mine"]
    assert sum(stream.n_bytes for stream in data.sources[0].splits.values()) == 1000
    assert list(data.split("calib")) == ["books", "books-2", "mine"]
    _, state = next(data.batches(4, 32, seed=0))
    assert [source["weight"] for source in state["sources"]] == [2, 1, 1] and state["unit"] == "document"
    with pytest.raises(UsageError, match="'x' is given to 2 sources"):
        prepare(DataConfig(mix=[Source(corpus=spec, name="x"), Source(corpus=spec, name="x")], tokenizer=Byte()))


def test_batches_are_of_the_train_split_and_resume(books):
    data = prepare(config_of(books))
    it = data.batches(2, 16, seed=3)
    assert isinstance(it, Batches)
    train = set(data.split("train")["books"].read(0, data.split("train")["books"].n_tokens).tolist())
    batch, state = next(it)
    assert set(batch.inputs_BT.ravel().tolist()) <= train
    assert np.array_equal(next(it)[0].inputs_BT, next(data.batches(2, 16, 3, state))[0].inputs_BT)
    with pytest.raises(UsageError, match="tokens are less than one batch"):
        data.batches(64, 4096, seed=0)


def test_describe_is_json(books):
    described = prepare(config_of(books)).describe()
    assert json.loads(json.dumps(described)) == described
    assert described["tokenizer"]["vocab_size"] == 257 and described["tokenizer"]["eot"] == "<|endoftext|>"
    sizes = described["sources"][0]["splits"]
    assert sum(part["documents"] for part in sizes.values()) == 60
    assert sum(part["bytes"] for part in sizes.values()) == len(books.read_text().replace("<|endoftext|>\n", ""))


def test_unknown_split(books):
    with pytest.raises(UsageError, match=r"split 'test': .* Allowed: train, valid, calib, probe"):
        prepare(config_of(books)).split("test")


def test_a_damaged_cache_is_noted(books, root):
    prepare(config_of(books))
    (entry,) = (root / "tokens").iterdir()
    (entry / "meta.json").unlink()
    assert "damaged" in prepare(config_of(books)).notes[0]


def test_token_files_need_the_tokenizer_that_made_them(books, tmp_path):
    made = prepare(config_of(books, tokenizer=Bpe(vocab_size=300))).tokenizer
    made.save(tmp_path / "tokenizer.json")
    ids = np.concatenate([[*made.encode(f"document {i}"), made.eot] for i in range(40)])
    ids.astype("<u2").tofile(tmp_path / "train.bin")
    config = {"corpus": f"bin:{tmp_path}/train.bin"}
    for kind in ("byte", "bpe"):
        with pytest.raises(UsageError, match=f"is tokens already, and tokenizer '{kind}' did not make them"):
            prepare(DataConfig(tokenizer=kind, **config))
    with pytest.raises(UsageError, match="is tokens already"):
        prepare(DataConfig(corpus=f"text:{books}", valid=config["corpus"]))
    data = prepare(DataConfig(tokenizer=File(path=str(tmp_path / "tokenizer.json")), **config))
    assert sorted(chain.from_iterable(texts(data, part) for part in PARTS)) == sorted(
        f"document {i}" for i in range(40)
    )


def test_open_corpus(books):
    stream = open_corpus(f"text:{books}", Byte().build(), max_bytes=100)
    assert (stream.n_bytes, stream.name) == (100, "books") and stream.n_tokens == 100 + stream.n_documents


def test_a_token_file_is_not_scored_with_a_tokenizer_of_the_run(tmp_path):
    np.arange(1, 60, dtype="<u2").tofile(tmp_path / "x.bin")
    bpe = Bpe(vocab_size=300).build(["some text " * 9])
    for tokenizer in (Byte().build(), bpe):
        with pytest.raises(UsageError, match=f"x.bin' is tokens already, and tokenizer '{tokenizer.kind}' did not"):
            open_corpus(f"bin:{tmp_path}/x.bin", tokenizer)
    bpe.save(tmp_path / "tokenizer.json")
    assert open_corpus(f"bin:{tmp_path}/x.bin", Tokenizer.load(tmp_path)).n_tokens == 60


def test_errors_of_the_corpus_come_through_the_training_of_a_tokenizer(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"fine\n<|endoftext|>\n\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        prepare(config_of(tmp_path / "bad.txt", tokenizer=Bpe()))


def test_a_cache_that_cannot_be_written_is_said_before_the_tokenizer_is_lost(books, root):
    root.write_text("a file")
    with pytest.raises(UsageError, match="ALCODA_CACHE"):
        prepare(config_of(books, tokenizer=Bpe(vocab_size=300)))


def test_config_defaults():
    config = DataConfig()
    assert [source.corpus for source in config.sources] == ["pystdlib"] and config.tokenizer == Bpe(vocab_size=4096)
    assert validate(DataConfig, json.loads(config.model_dump_json())) == config
    assert DataConfig(corpus="text:x", max_bytes=9).sources == (Source(corpus="text:x", max_bytes=9),)
    mix = DataConfig(mix=["text:x", Source(corpus="text:y", max_bytes=3)], max_bytes=9)
    assert [source.max_bytes for source in mix.sources] == [9, 3]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"corpus": "pystdlib", "mix": ["text:x"]}, "corpus ('pystdlib') and mix exclude each other"),
        ({"splits": {"valid": 0.5, "calib": 0.3, "probe": 0.2}}, "splits: valid + calib + probe = 0.5 + 0.3 + 0.2 = 1"),
        ({"splits": {"valid": 0}}, "splits.valid: input should be greater than 0"),
        ({"splits": {"test": 0.1}}, "unknown key 'test'"),
        ({"tokenizer": "bqe"}, "unknown tokenizer 'bqe'; did you mean 'bpe'"),
        (
            {"tokenizer": {"kind": "bpe", "vocab_size": 100}},
            "tokenizer.vocab_size: a byte-level vocabulary has at least 257",
        ),
        ({"mix": [{"corpus": "a", "weight": -1}]}, "mix.0.weight: input should be greater than 0"),
        ({"mix_unit": "rows"}, "mix_unit: input should be 'row' or 'document'"),
        ({"max_bytes": 0}, "max_bytes: input should be greater than or equal to 1"),
        ({"max_byte": 1}, "unknown key 'max_byte'; did you mean 'max_bytes'"),
    ],
)
def test_config_errors(data, says):
    with pytest.raises(UsageError) as caught:
        validate(DataConfig, data)
    assert says in str(caught.value)


def test_no_torch():
    code = "import sys, alcoda.data; print(sorted({'torch', 'pyarrow', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

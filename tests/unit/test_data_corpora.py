"""Corpora: what the documents are, and what the user reads when they cannot be had."""

import json
import sys

import pytest

from alcoda.data.corpora import FORMS, Corpus, corpus, form
from alcoda.errors import UsageError


def documents(spec, max_bytes=None):
    return list(corpus(str(spec)).documents(max_bytes))


def error_of(action):
    with pytest.raises(UsageError) as caught:
        action()
    return str(caught.value)


def test_pystdlib_has_the_library_without_tests_and_machine_paths():
    one = corpus("pystdlib")
    files = [path.as_posix() for path in one.files]
    assert any(path.endswith("/argparse.py") for path in files) and any(
        path.endswith("/json/decoder.py") for path in files
    )
    for part in ("/test/", "/tests/", "/site-packages/", "/idle_test/", "/__pycache__/", "_sysconfigdata"):
        assert not any(part in path for path in files), part
    assert one.files == sorted(one.files) and one.name == "pystdlib" and one.n_bytes > 5_000_000
    assert len(documents("pystdlib", 300_000)) > 5
    assert "takes nothing" in error_of(lambda: corpus("pystdlib:x"))


def test_pystdlib_without_source(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "zip"))
    message = error_of(lambda: corpus("pystdlib"))
    assert "no library source" in message and "text:FOLDER" in message


def test_text_is_cut_at_lines_that_are_exactly_the_mark(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"\xef\xbb\xbfone\r\n<|endoftext|>\r\ntwo <|endoftext|>\n <|endoftext|>\n"
        b"still\n<|endoftext|>\n \n<|endoftext|>\nlast"
    )
    assert documents(f"text:{path}") == ["one\r\n", "two <|endoftext|>\n <|endoftext|>\nstill\n", "last"]


def test_text_folder_is_read_in_order_without_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/c.txt", "a.txt", ".hidden", ".git/x", "z"):
        (tmp_path / name).write_text(name)
    assert documents(f"text:{tmp_path}") == ["a.txt", "b/c.txt", "z"]


def test_content_hash_is_of_content_not_of_place(tmp_path):
    for name, parts in {"a": ["xy", "z"], "b": ["xy", "z"], "c": ["x", "yz"], "d": ["xy", "Z"]}.items():
        (tmp_path / name).mkdir()
        for i, part in enumerate(parts):
            (tmp_path / name / f"{i}{name}.txt").write_text(part)
    a, b, c, d = (corpus(f"text:{tmp_path / name}").content_hash() for name in "abcd")
    assert a == b and len({a, c, d}) == 3


def test_max_bytes_cuts_the_last_document_in_whole_characters(tmp_path):
    (tmp_path / "a.txt").write_text("ab\n<|endoftext|>\ncé\n<|endoftext|>\nd", encoding="utf-8")
    for n, expected in {1: ["a"], 3: ["ab\n"], 4: ["ab\n", "c"], 5: ["ab\n", "c"], 6: ["ab\n", "cé"]}.items():
        assert documents(f"text:{tmp_path}", n) == expected, n
    assert documents(f"text:{tmp_path}", 999) == ["ab\n", "cé\n", "d"]


def test_max_bytes_does_not_read_a_long_document_to_its_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text\n" * 100 + b"\x00\xff")  # an error, were it read
    assert documents(f"text:{tmp_path}", 12) == ["text\ntext\nte"]


def test_jsonl(tmp_path):
    lines = [{"text": "a"}, "b", {"text": "", "id": 1}, {"id": 2, "text": "c\u0000\n"}]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (tmp_path / "readme.txt").write_text("not json")
    assert documents(f"jsonl:{path}") == documents(f"jsonl:{tmp_path}") == ["a", "b", "c\u0000\n"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{broken", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"body": "x"}', "no field 'text' (it has 'body')"),
        (b'{"text": 3}', "is to be a string, not int"),
        (b"[1]", "is to be a string, not list"),
        (b"null", "is to be a string, not NoneType"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"\x1f\x8b\x08", "compressed?"),
    ],
)
def test_jsonl_errors_name_file_and_line(tmp_path, line, says):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'"fine"\n' + line + b"\n")
    message = error_of(lambda: documents(f"jsonl:{path}"))
    assert says in message and f"{path} line 2" in message


def test_text_errors_name_the_byte(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"fine\n<|endoftext|>\nab\xff")
    message = error_of(lambda: documents(f"text:{path}"))
    assert f"byte 0xff is not UTF-8 at byte offset {path.read_bytes().index(0xFF)}" in message and str(path) in message
    path.write_bytes(b"fine\n<|endoftext|>\nab\x00")
    assert "NUL byte at byte offset 21" in error_of(lambda: documents(f"text:{path}"))


def test_paths_that_are_not_there_or_empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"no file or folder nowhere (looked for in {tmp_path})" in error_of(lambda: corpus("text:nowhere"))
    assert "the folder has no visible file" in error_of(lambda: corpus("text:."))
    assert "no .jsonl or .ndjson file" in error_of(lambda: corpus("jsonl:."))
    (tmp_path / "e").touch()
    assert "the file is empty" in error_of(lambda: corpus("text:e"))
    assert "all files are empty" in error_of(lambda: corpus("text:."))
    (tmp_path / "e").write_text(" \n\n<|endoftext|>\n\t")
    assert "no document with any text" in error_of(lambda: documents("text:e"))
    assert "write 'text:PATH'" in error_of(lambda: corpus("text:"))


def test_unknown_forms(tmp_path):
    assert "did you mean 'jsonl'" in error_of(lambda: corpus("jsonal:x"))
    assert f"'text:{tmp_path}'" in error_of(lambda: corpus(str(tmp_path)))


def test_a_form_can_be_added_and_not_taken(monkeypatch):
    monkeypatch.setattr("alcoda.data.corpora.FORMS", dict(FORMS))

    @form("three")
    class Three(Corpus):
        def _documents(self, max_bytes):
            return iter("abc")

    assert documents("three") == ["a", "b", "c"]
    with pytest.raises(TypeError, match="taken by Text"):
        form("text")(Three)


def test_names_are_short_and_tell_common_files_apart(tmp_path):
    (tmp_path / "books").mkdir()
    for name in ("train.txt", "novel.txt"):
        (tmp_path / "books" / name).write_text("x")
    names = [corpus(f"text:{tmp_path}/books{rest}").name for rest in ("", "/train.txt", "/novel.txt")]
    assert names == ["books", "books-train", "novel"]


def write_parquet(path, **columns):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.table(columns), path)


def test_parquet(tmp_path):
    write_parquet(tmp_path / "a.parquet", id=[1, 2, 3], text=["a", None, "b\n"])
    write_parquet(tmp_path / "b.parquet", text=["c"])
    assert documents(f"parquet:{tmp_path}") == ["a", "b\n", "c"]
    assert corpus(f"parquet:{tmp_path}").n_bytes > 0


def test_parquet_errors(tmp_path):
    path = tmp_path / "a.parquet"
    write_parquet(path, body=["a"])
    assert "no column 'text' (it has 'body')" in error_of(lambda: corpus(f"parquet:{path}"))
    write_parquet(path, text=[1])
    assert "holds int64, and is to hold strings" in error_of(lambda: corpus(f"parquet:{path}"))
    path.write_bytes(b"no parquet at all")
    assert f"{path} is no parquet file" in error_of(lambda: corpus(f"parquet:{path}"))
    write_parquet(path, text=["a" * 50, "b"] * 500)
    raw = bytearray(path.read_bytes())
    raw[4:60] = bytes(56)
    path.write_bytes(raw)
    assert f"{path} is damaged" in error_of(lambda: documents(f"parquet:{path}"))


def test_missing_extras_say_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in error_of(lambda: corpus(f"parquet:{tmp_path}"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in error_of(lambda: corpus("hf:some/name"))


class FakeDatasets:
    """What the `hf` form asks of the datasets library."""

    class Builder:
        config_id, hash = "default", "h1"

    class Stream(list):
        info = None

    def __init__(self, rows=(), fails=None):
        self.rows, self.fails, self.calls = rows, fails, []

    def load_dataset(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        if self.fails:
            raise self.fails
        return self.Stream(self.rows)

    def load_dataset_builder(self, *args):
        return self.Builder()


def test_hf(monkeypatch):
    fake = FakeDatasets([{"text": "a"}, {"text": None}, {"text": "b"}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    one = corpus("hf:org/name:cfg")
    assert list(one.documents()) == ["a", "b"] and one.name == "name"
    assert fake.calls == [(("org/name", "cfg"), {"streaming": True, "split": "train"})]
    first = one.content_hash()
    monkeypatch.setattr(FakeDatasets.Builder, "hash", "h2")
    assert first != one.content_hash() != corpus("hf:org/name").content_hash()


def test_hf_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(fails=ConnectionError("Couldn't reach it\nlong story")))
    message = error_of(lambda: documents("hf:x"))
    assert "Couldn't reach it. Check the name" in message and "story" not in message
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets([{"body": "a"}]))
    assert "no column 'text' (it has 'body')" in error_of(lambda: documents("hf:x"))
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets([{"text": ["a"]}]))
    assert "holds list" in error_of(lambda: documents("hf:x"))
    assert "write 'hf:NAME'" in error_of(lambda: corpus("hf:"))


def test_hf_reads_a_local_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / ".hub"))
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"text": "hello"}\n{"text": "there"}\n')
    one = corpus(f"hf:{tmp_path}")
    assert list(one.documents()) == ["hello", "there"] and len(one.content_hash()) == 64
    assert "cannot read it" in error_of(lambda: documents(f"hf:{tmp_path}:nocfg"))


def test_bin_is_cut_at_the_end_of_text_token(tmp_path):
    import numpy as np

    np.array([0, 5, 6, 0, 0, 7], "<u2").tofile(tmp_path / "a.bin")
    np.array([8, 0], "<u2").tofile(tmp_path / "b.bin")
    one = corpus(f"bin:{tmp_path}")
    assert [part.tolist() for part in one.token_documents(eot=0, vocab_size=9)] == [[5, 6], [7], [8]]
    message = error_of(lambda: list(one.token_documents(eot=0, vocab_size=8)))
    assert "b.bin has token 8 at position 0" in message and "8 tokens" in message
    assert "tokenizer: {kind: file" in error_of(lambda: documents(f"bin:{tmp_path}"))


def test_bin_errors(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    assert "odd number of bytes (3)" in error_of(lambda: corpus(f"bin:{path}"))
    path.write_bytes(bytes(4))
    assert "nothing but end-of-text" in error_of(lambda: list(corpus(f"bin:{path}").token_documents(0, 9)))

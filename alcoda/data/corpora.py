"""Where text comes from: a corpus is named by a string ``FORM:REST`` and read as a stream of documents.

    pystdlib            the running Python's own standard library, one file a document
    text:PATH           a file or a folder; documents end at a line ``<|endoftext|>``
    jsonl:PATH          a file or a folder; one document a line
    parquet:PATH        a file or a folder; column ``text``          (tables.py)
    hf:NAME[:CONFIG]    a dataset of the Hugging Face hub            (tables.py)
    bin:PATH            tokens already, nanoGPT's uint16 files       (binary.py)
    hops[:OPTIONS]      generated pointer chasing, known depths      (hops.py)

A new form is a subclass of `Corpus` under ``@form("name")``. Documents without anything but white space are skipped
everywhere. Whatever is wrong with a corpus is a `UsageError` that names the path, the trouble and the way out.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from alcoda.errors import UsageError, did_you_mean
from alcoda.progress import bar

END_OF_TEXT = "<|endoftext|>"
_BLOCK_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"
_COMMON = frozenset({"train", "valid", "validation", "val", "test", "data", "text", "corpus", "input"})

FORMS: dict[str, type[Corpus]] = {}


def form(name: str) -> Callable[[type[Corpus]], type[Corpus]]:
    """Register the class as the form ``name`` of a corpus."""

    def register(cls: type[Corpus]) -> type[Corpus]:
        if name in FORMS and FORMS[name].__qualname__ != cls.__qualname__:
            raise TypeError(f"corpus form {name!r} is taken by {FORMS[name].__qualname__}")
        cls.form, FORMS[name] = name, cls
        return cls

    return register


def corpus(spec: str) -> Corpus:
    """The corpus that ``spec`` (``FORM`` or ``FORM:REST``) names. Nothing but its existence is checked yet."""
    kind, _, rest = spec.partition(":")
    if kind not in FORMS:
        if Path(spec).expanduser().exists():
            raise UsageError(f"corpus {spec!r}: say what the path holds, for example 'text:{spec}' or 'jsonl:{spec}'")
        raise UsageError(f"corpus {spec!r}: unknown form {kind!r}{did_you_mean(kind, FORMS)}")
    return FORMS[kind](spec, rest)


class Corpus:
    """Documents to read, once or many times, always in the same order."""

    form: ClassVar[str]
    has_text: ClassVar[bool] = True
    """False where the corpus is tokens already."""
    has_answers: ClassVar[bool] = False
    """Whether there is `asked`, which a stage of a source needs."""

    spec: str
    """As the user wrote it."""
    name: str
    """Short, for tables and messages; not always unique."""
    n_bytes: int | None = None
    """How much there is to read, about, for a progress bar. None: not known."""

    def __init__(self, spec: str, rest: str) -> None:
        self.spec, self.name = spec, rest

    def documents(self, max_bytes: int | None = None) -> Iterator[str]:
        """The documents. After ``max_bytes`` bytes of UTF-8 text the stream ends; the last document is cut to fit."""
        left, any_text = max_bytes, False
        for document in self._documents(max_bytes):
            if left is not None:
                document, left = _head(document, left)
            if document and not document.isspace():
                any_text = True
                yield document
            if left is not None and left <= 0:
                break
        if not any_text:
            raise UsageError(f"corpus {self.spec!r}: no document with any text in it")

    def content_hash(self) -> str:
        """A sha256 (hex) that changes when the documents do, and does not depend on where they lie."""
        raise NotImplementedError

    def asked(self, document: bytes) -> list[tuple[int, int]]:
        """In a document (or its beginning), the bytes ``start .. stop`` of the answers that tell of mastery."""
        raise NotImplementedError

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        """Every document, empty ones too. ``max_bytes`` is a hint: nobody reads on after so many."""
        raise NotImplementedError


def _head(document: str, max_bytes: int) -> tuple[str, int]:
    """As much of ``document`` as fits in ``max_bytes`` bytes, in whole characters, and the bytes then left."""
    raw = document.encode()
    if len(raw) < max_bytes:
        return document, max_bytes - len(raw)
    return raw[:max_bytes].decode(errors="ignore"), 0


class FileCorpus(Corpus):
    """A corpus that lies in one file or in the files of a folder, which are read in the order of their names."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """Which files of a folder belong to it; empty: all. A file that is named itself may be called anything."""

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        if not rest:
            raise UsageError(f"corpus {spec!r}: a path is missing; write '{self.form}:PATH'")
        self.path = Path(rest).expanduser()
        self.files = self._find()
        self.name = _short(self.path.resolve()) or self.form
        self.n_bytes = sum(path.stat().st_size for path in self.files)
        if self.n_bytes == 0:
            raise UsageError(f"corpus {spec!r}: {'the file is' if self.path.is_file() else 'all files are'} empty")

    def _find(self) -> list[Path]:
        if not self.path.exists():
            raise UsageError(f"corpus {self.spec!r}: there is no file or folder {shown(self.path)}")
        files = list(walk(self.path, self.suffixes)) if self.path.is_dir() else [self.path]
        if not files:
            what = " or ".join(self.suffixes) or "visible"
            raise UsageError(f"corpus {self.spec!r}: the folder has no {what} file in it")
        for path in files:
            if not os.access(path, os.R_OK):
                raise UsageError(f"corpus {self.spec!r}: {path} may not be read; change its permissions")
        return files

    def content_hash(self) -> str:
        digest = hashlib.sha256(self.form.encode())
        with bar(f"checking {self.name}", self.n_bytes) as advance:
            for path in self.files:
                digest.update(path.stat().st_size.to_bytes(8, "little"))  # where a file ends, a document ends
                with path.open("rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        digest.update(block)
                        advance(len(block))
        return digest.hexdigest()


def _short(path: Path) -> str:
    """The name without its suffix; for a name that every corpus has (``train.txt``) the folder's name before it."""
    return f"{path.parent.name}-{path.stem}" if path.stem in _COMMON and path.parent.name else path.stem


def shown(path: Path) -> str:
    """``path``, and for a relative one where it was looked for."""
    return str(path) if path.is_absolute() else f"{path} (looked for in {Path.cwd()})"


def walk(folder: Path, suffixes: tuple[str, ...] = (), skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below ``folder`` in the order of their names, but hidden ones and folders in ``skip``."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(root, name) for name in files if not name.startswith(".") and name.endswith(suffixes or "")]
    return iter(sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts))


def decode(raw: bytes, spec: str, path: Path, at_byte: int = 0) -> str:
    """``raw``, which begins at byte ``at_byte`` of the file, as text; an error says where it is none."""
    zero = raw.find(b"\0")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        wrong, at = f"byte {raw[error.start]:#04x} is not UTF-8", error.start
    else:
        if zero < 0:
            return text
        wrong, at = "a NUL byte", zero
    raise UsageError(
        f"corpus {spec!r}: {path} is not a text file: {wrong} at byte offset {at_byte + at}. "
        "Convert it to UTF-8, or leave it out of the folder"
    )


@form("text")
class Text(FileCorpus):
    """Text files. A line that is exactly ``<|endoftext|>`` ends a document, and so does the end of a file."""

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for path in self.files:
            yield from self._pieces(path, max_bytes)

    def _pieces(self, path: Path, max_bytes: int | None) -> Iterator[str]:
        mark, lines, start, length = END_OF_TEXT.encode(), [], 0, 0
        with path.open("rb") as file:
            if file.read(len(_BOM)) == _BOM:
                start = len(_BOM)
            file.seek(start)
            for line in file:
                if len(line) <= len(mark) + 2 and line.rstrip(b"\r\n") == mark:
                    yield decode(b"".join(lines), self.spec, path, start)
                    start, length, lines = start + length + len(line), 0, []
                    continue
                lines.append(line)
                length += len(line)
                # The hint keeps a huge document out of memory; a whole line is kept so that no character is cut.
                if max_bytes is not None and length > max_bytes:
                    break
        yield decode(b"".join(lines), self.spec, path, start)


@form("pystdlib")
class PyStdlib(FileCorpus):
    """The source of the running Python's standard library without its tests: text that every installation has."""

    suffixes = (".py",)
    # Installed packages and tests are not the library.
    _skip = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

    def __init__(self, spec: str, rest: str) -> None:
        if rest:
            raise UsageError(f"corpus {spec!r}: 'pystdlib' takes nothing after it")
        super().__init__(spec, sysconfig.get_path("stdlib"))
        self.name = "pystdlib"

    def _find(self) -> list[Path]:
        # _sysconfigdata holds the paths of the machine that Python was built on, which no model should learn.
        files = [] if not self.path.is_dir() else list(walk(self.path, self.suffixes, self._skip))
        files = [path for path in files if not path.name.startswith("_sysconfigdata")]
        if not files:
            raise UsageError(
                f"corpus {self.spec!r}: this Python has no library source in {self.path}; name another corpus, "
                "for example 'text:FOLDER'"
            )
        return files

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for path in self.files:
            yield decode(path.read_bytes(), self.spec, path)


@form("jsonl")
class Jsonl(FileCorpus):
    """One JSON value a line: an object whose field ``text`` is a document, or a string that is one."""

    suffixes = (".jsonl", ".ndjson")

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for path in self.files:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.isspace():
                        yield self._text(line, f"corpus {self.spec!r}: {path} line {number}")

    def _text(self, line: bytes, where: str) -> str:
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UsageError(f"{where}: not UTF-8 at byte {error.start} of the line; is the file compressed?") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if isinstance(value, dict):
            if "text" not in value:
                has = ", ".join(map(repr, value)) or "none"
                raise UsageError(f"{where}: no field 'text' (it has {has}); rename the field that holds the text")
            value = value["text"]
        if not isinstance(value, str):
            kind = type(value).__name__
            raise UsageError(f'{where}: the text is to be a string, not {kind}; write {{"text": "..."}}')
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{where}: half a surrogate pair at character {error.start} of the text") from None
        return value

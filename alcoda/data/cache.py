"""Each corpus is tokenised once, into a folder of the cache, and read from there as a memory map.

    $ALCODA_CACHE (or ~/.cache/alcoda)
      tokens/<key>/          key: content of the corpus, tokenizer, max_bytes, format
        tokens.bin           uint16 (uint32 for more than 65,536 tokens); each document is EOT and its tokens
        offsets.npy          int64, where each document starts (its EOT), in tokens
        doc_bytes.npy        int64, bytes of text of each document
        doc_hashes.npy       uint64, a hash of the tokens of each document
        meta.json            sizes, to tell a whole entry from a damaged one
      tokenizers/<key>.json  trained tokenizers (prepare.py)

An entry is written beside its place and renamed, so that another process sees all of it or nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from alcoda.data.binary import Bin
from alcoda.data.corpora import Corpus
from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import RunError, UsageError
from alcoda.progress import Advance, bar

FORMAT = 2
_BATCH_BYTES = 4 << 20
"""Text that is encoded at a time: enough for every core, little enough to hold."""
_BLOCK_TOKENS = 1 << 22
_PARTS = ("offsets", "doc_bytes", "doc_hashes")
_ABANDONED_S = 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_WAY_OUT = "set ALCODA_CACHE to a folder on another disk"


def cache_root() -> Path:
    """``$ALCODA_CACHE``, or ``~/.cache/alcoda``."""
    return Path(os.environ.get("ALCODA_CACHE") or "~/.cache/alcoda").expanduser()


@dataclass(frozen=True, eq=False)
class TokenStore:
    """A tokenised corpus on disk. N tokens (EOTs included), M documents."""

    name: str
    tokens: np.ndarray
    """Memory map of uint16 or uint32, shape N."""
    offsets: np.ndarray
    """Where each document starts, in tokens; int64, shape M + 1: the last is N."""
    doc_bytes: np.ndarray
    """Bytes of text of each document; int64, shape M."""
    token_bytes_V: np.ndarray
    """Bytes of text that each token stands for (`Tokenizer.token_bytes_V`)."""
    doc_hashes: np.ndarray
    """Equal for documents of the same tokens; uint64, shape M."""
    notes: tuple[str, ...] = ()
    """What the user should know: a damaged cache, text that the tokenizer does not know."""


def tokenise(corpus: Corpus, tokenizer: Tokenizer, max_bytes: int | None = None) -> TokenStore:
    """The tokens of the first ``max_bytes`` bytes of ``corpus``, from the cache, or into it first.

    Raises UsageError for a corpus that cannot be read and a cache that may not be written, RunError for a full disk.
    """
    key = key_of("tokens", FORMAT, corpus.content_hash(), tokenizer.sha256, max_bytes)
    folder = cache_root() / "tokens" / key
    damaged = folder.exists()
    if damaged:
        store = _open(folder, corpus.name, tokenizer)
        if store is not None:
            return store
    with _writing(folder, corpus.name) as temporary:
        _write(temporary, corpus, tokenizer, max_bytes)
        # Opened before it is renamed: what happens to the folder afterwards does not concern a map that is open.
        store = _open(temporary, corpus.name, tokenizer)
        if store is None:
            raise RunError(f"{corpus.name}: the tokens just written to {temporary} read back otherwise; check the disk")
    if not damaged:
        return store
    return replace(
        store, notes=(f"{corpus.name}: its entry in the token cache was damaged, and was written anew", *store.notes)
    )


def key_of(*parts: object) -> str:
    """The name of a cache entry: a hash of what it was made from."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(folder: Path, name: str, tokenizer: Tokenizer) -> TokenStore | None:
    """The entry in ``folder``; None where it is not what its meta.json says."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        n_tokens, n_documents, dtype = meta["n_tokens"], meta["n_documents"], np.dtype(meta["dtype"])
        n_unknown, path = meta["n_unknown"], folder / "tokens.bin"
        starts, doc_bytes, doc_hashes = (np.load(folder / f"{part}.npy") for part in _PARTS)
        whole = path.stat().st_size == n_tokens * dtype.itemsize
        whole &= starts.shape == doc_bytes.shape == doc_hashes.shape == (n_documents,)
        whole &= int(doc_bytes.sum()) == meta["n_bytes"]
        if not whole:
            return None
        tokens = np.memmap(path, dtype=dtype, mode="r", shape=(n_tokens,))
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError):
        return None
    notes = (
        f"{name}: {100 * n_unknown / n_tokens:.3g}% of the tokens are unknown to the tokenizer: bits per byte leaves "
        "their text out",
    )
    offsets = np.append(starts, n_tokens)
    return TokenStore(name, tokens, offsets, doc_bytes, tokenizer.token_bytes_V, doc_hashes, notes if n_unknown else ())


def _write(folder: Path, corpus: Corpus, tokenizer: Tokenizer, max_bytes: int | None) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    starts, sizes, hashes, n_tokens, n_bytes, n_unknown = array("q"), array("q"), array("Q"), 0, 0, 0
    try:
        with (folder / "tokens.bin").open("wb") as file, _bar(corpus, max_bytes) as advance:
            for ids_T, doc_bytes in _encoded(corpus, tokenizer, max_bytes):
                starts.append(n_tokens)
                sizes.append(doc_bytes)
                file.write(np.array([tokenizer.bos], dtype).tobytes())
                digest = hashlib.blake2b(digest_size=8)
                for start in range(0, len(ids_T), _BLOCK_TOKENS):
                    block_T = ids_T[start : start + _BLOCK_TOKENS]
                    raw = block_T.astype(dtype).tobytes()
                    file.write(raw)
                    digest.update(raw)
                    n_unknown += 0 if tokenizer.unk is None else int((block_T == tokenizer.unk).sum())
                hashes.append(int.from_bytes(digest.digest(), "little"))
                n_tokens += 1 + len(ids_T)
                n_bytes += doc_bytes
                advance(doc_bytes)
            file.flush()
            os.fsync(file.fileno())  # a renamed folder with holes would look whole after a power cut
    except OSError as error:
        if error.errno in _FULL:
            share = n_bytes / (_n_bytes(corpus, max_bytes) or n_bytes or 1)
            written = n_tokens * dtype.itemsize
            raise _disk_full(folder.parent, corpus.name, round(written / (share or 1.0)), written) from None
        raise
    if not n_tokens:
        raise UsageError(f"corpus {corpus.spec!r}: max_bytes ({max_bytes}) is less than its first token")
    np.save(folder / "offsets.npy", np.array(starts, np.int64))
    np.save(folder / "doc_bytes.npy", np.array(sizes, np.int64))
    np.save(folder / "doc_hashes.npy", np.array(hashes, np.uint64))
    meta = {
        "corpus": corpus.spec,
        "n_tokens": n_tokens,
        "n_documents": len(starts),
        "n_bytes": n_bytes,
        "n_unknown": n_unknown,
        "dtype": dtype.str,
        "max_bytes": max_bytes,
        "tokenizer": tokenizer.sha256,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _encoded(corpus: Corpus, tokenizer: Tokenizer, max_bytes: int | None) -> Iterator[tuple[np.ndarray, int]]:
    """The tokens of each document, and the bytes of text that they are."""
    if isinstance(corpus, Bin):
        yield from _given(corpus, tokenizer, max_bytes)
        return
    texts: list[str] = []
    sizes: list[int] = []
    held = 0
    for text in corpus.documents(max_bytes):
        texts.append(text)
        sizes.append(len(text.encode()))
        held += sizes[-1]
        if held >= _BATCH_BYTES:
            yield from zip(tokenizer.encode_batch(texts), sizes, strict=True)
            texts, sizes, held = [], [], 0
    yield from zip(tokenizer.encode_batch(texts), sizes, strict=True)


def _given(corpus: Bin, tokenizer: Tokenizer, max_bytes: int | None) -> Iterator[tuple[np.ndarray, int]]:
    left = max_bytes
    for ids_T in corpus.token_documents(tokenizer.eot, tokenizer.vocab_size):
        n_bytes = n_taken = 0
        for start in range(0, len(ids_T), _BLOCK_TOKENS):
            ends_T = np.cumsum(tokenizer.token_bytes_V[ids_T[start : start + _BLOCK_TOKENS]], dtype=np.int64)
            fits = len(ends_T) if left is None else int(np.searchsorted(ends_T, left - n_bytes, side="right"))
            n_bytes += int(ends_T[fits - 1]) if fits else 0
            n_taken += fits
            if fits < len(ends_T):
                break
        if n_taken:
            yield ids_T[:n_taken], n_bytes
        if left is not None:
            left -= n_bytes
            if n_taken < len(ids_T) or left <= 0:
                return


def _n_bytes(corpus: Corpus, max_bytes: int | None) -> int | None:
    return min((n for n in (corpus.n_bytes, max_bytes) if n is not None), default=None)


def _bar(corpus: Corpus, max_bytes: int | None) -> contextlib.AbstractContextManager[Advance]:
    return bar(f"tokenising {corpus.name}", _n_bytes(corpus, max_bytes))


@contextlib.contextmanager
def _writing(folder: Path, name: str) -> Generator[Path]:
    """A temporary folder that takes the place of ``folder`` if all goes well, and vanishes if not."""
    with explained(name):
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with explained(name):
            yield temporary
            _put(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _put(temporary: Path, folder: Path) -> None:
    """Rename ``temporary`` to ``folder``, also where something stands: a damaged entry, or another process's."""
    for _ in range(100):
        with contextlib.suppress(FileExistsError):  # what a rename onto a folder with something in it raises, or:
            try:
                os.rename(temporary, folder)
                return
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
        away = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        with contextlib.suppress(FileNotFoundError):  # a third process may have moved it away
            os.rename(folder, away)
        shutil.rmtree(away, ignore_errors=True)
    raise RunError(f"the cache entry {folder} is written by other processes all the time; try again")


def _sweep(parent: Path) -> None:
    """Remove what a killed process left: temporary folders that nobody has written to for a day."""
    for path in parent.glob(".*-*"):
        with contextlib.suppress(OSError):
            newest = max(part.stat().st_mtime for part in (path, *path.iterdir()))
            if time.time() - newest > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def explained(name: str) -> Generator[None]:
    """Turn a failure of the disk while ``name`` is read and written to the cache into a message with the way out."""
    root = cache_root()
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(root, name) from None
        path = Path(os.fsdecode(error.filename)) if error.filename is not None else None
        if path is not None and (path.is_relative_to(root) or root.is_relative_to(path)):
            raise UsageError(f"the cache {root} cannot be written ({error.strerror}); {_WAY_OUT}") from None
        raise RunError(f"{name}: {error}") from None


def _disk_full(folder: Path, name: str, needed_bytes: int = 0, written_bytes: int = 0) -> RunError:
    present = next(path for path in (folder, *folder.parents) if path.exists())
    free_bytes = shutil.disk_usage(present).free + written_bytes  # what was written is removed again
    needs = f"it needs about {needed_bytes:,} bytes, " if needed_bytes else ""
    return RunError(
        f"no space left on the disk of {folder} for the tokens of {name}: {needs}{free_bytes:,} are free. "
        f"Free some, or {_WAY_OUT}"
    )

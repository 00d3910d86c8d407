"""Corpora that other libraries read: parquet files (extra ``data``) and the Hugging Face hub (extra ``hf``)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from alcoda.data.corpora import Corpus, FileCorpus, form
from alcoda.errors import UsageError

_ROWS = 256
"""Rows of a parquet file that are held in memory at a time."""


@form("parquet")
class Parquet(FileCorpus):
    """Parquet files with a column ``text``; a row is a document, a null none."""

    suffixes = (".parquet",)

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        total = 0
        for path in self.files:
            with self._open(path) as file:
                column = next(i for i, name in enumerate(file.schema_arrow.names) if name == "text")
                groups = [file.metadata.row_group(i).column(column) for i in range(file.metadata.num_row_groups)]
                total += sum(group.total_uncompressed_size for group in groups)
        self.n_bytes = total

    @contextlib.contextmanager
    def _open(self, path: Path) -> Generator[Any]:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            text = "parquet files need pyarrow; install it with: pip install pyarrow"
            raise UsageError(f"corpus {self.spec!r}: {text}") from None
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"corpus {self.spec!r}: {path} is no parquet file: {error}") from None
        with file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                has = ", ".join(map(repr, schema.names)) or "none"
                raise UsageError(
                    f"corpus {self.spec!r}: {path} has no column 'text' (it has {has}); rename one to 'text'"
                )
            kind = schema.field("text").type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
                raise UsageError(f"corpus {self.spec!r}: {path}: column 'text' holds {kind}, and is to hold strings")
            try:
                yield file
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise UsageError(f"corpus {self.spec!r}: {path} is damaged: {error}") from None

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for path in self.files:
            with self._open(path) as file:
                for batch in file.iter_batches(batch_size=_ROWS, columns=["text"]):
                    yield from (text for text in batch.column(0).to_pylist() if text is not None)


@form("hf")
class HuggingFace(Corpus):
    """Split ``train`` of a dataset, streamed: ``hf:NAME`` or ``hf:NAME:CONFIG``. NAME may be a local folder."""

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        self.dataset, _, self.config = rest.partition(":")
        if not self.dataset:
            raise UsageError(f"corpus {spec!r}: a dataset is missing; write 'hf:NAME' or 'hf:NAME:CONFIG'")
        self.name = self.dataset.rstrip("/").rpartition("/")[2] or "hf"
        try:
            import datasets
        except ImportError:
            text = "datasets of the hub need the datasets library; install it with: pip install datasets"
            raise UsageError(f"corpus {spec!r}: {text}") from None
        self._datasets = datasets

    def content_hash(self) -> str:
        """Of name, config and the fingerprint that the datasets library gives to the data files."""
        builder = self._call(self._datasets.load_dataset_builder)
        return hashlib.sha256(
            repr(("hf", self.dataset, self.config, builder.config_id, builder.hash)).encode()
        ).hexdigest()

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        stream = self._call(self._datasets.load_dataset, streaming=True, split="train")
        if stream.info is not None and stream.info.dataset_size:
            self.n_bytes = stream.info.dataset_size
        rows = iter(stream)
        while (row := self._call(lambda *_: next(rows, None))) is not None:
            if "text" not in row:
                has = ", ".join(map(repr, row))
                raise UsageError(f"corpus {self.spec!r}: the dataset has no column 'text' (it has {has})")
            text = row["text"]
            if text is not None and not isinstance(text, str):
                kind = type(text).__name__
                raise UsageError(f"corpus {self.spec!r}: column 'text' holds {kind}, and is to hold strings")
            yield text or ""

    def _call(self, function: Any, **kwargs: Any) -> Any:
        try:
            return function(self.dataset, self.config or None, **kwargs)
        except Exception as error:  # the library raises a dozen kinds: no network, no such name, config or split, ...
            message = str(error).strip().splitlines() or [type(error).__name__]
            raise UsageError(
                f"corpus {self.spec!r}: the datasets library cannot read it: {message[0]}. "
                "Check the name, the config and the network, or give a folder on this machine"
            ) from None

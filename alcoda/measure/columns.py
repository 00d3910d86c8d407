"""A table of tokens as parquet, written batch by batch: a file that is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from alcoda import progress
from alcoda.files import disk


class Columns(Protocol):
    """Takes columns ``[N]`` and ``[N, R]`` of the next rows; strings as lists."""

    def __call__(self, columns: Mapping[str, np.ndarray | list[str]]) -> None: ...


@contextmanager
def parquet_file(path: Path) -> Generator[Columns]:
    """What writes rows to ``path``, which is there when the block ends well. Without pyarrow it says so, and writes
    nothing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        old = f"; the one in {path.parent} is of an earlier lab" if path.exists() else ""
        progress.say(f"{path.name} is left out: it needs pyarrow; install it with: pip install pyarrow{old}")
        yield _nothing
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    writers: list[Any] = []

    def write(columns: Mapping[str, np.ndarray | list[str]]) -> None:
        table = pa.table({name: _array(pa, column) for name, column in columns.items()})
        if not writers:
            writers.append(pq.ParquetWriter(temporary, table.schema, compression="zstd"))
        writers[0].write_table(table)

    try:
        with disk(path):
            yield write
            for writer in writers:
                writer.close()
            temporary.replace(path)
    finally:
        for writer in writers:
            writer.close()
        temporary.unlink(missing_ok=True)


def _array(pa: Any, column: np.ndarray | list[str]) -> Any:
    if isinstance(column, list):
        return pa.array(column, pa.string()).dictionary_encode()
    if column.ndim == 1:
        return pa.array(column)
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(column).ravel()), column.shape[1])


def _nothing(columns: Mapping[str, np.ndarray | list[str]]) -> None:
    pass

"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alcoda.errors import RunError


def write_text(path: Path, text: str) -> None:
    """Write a file by renaming a finished one into its place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk(path):
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """JSON from a file; RunError where it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


@contextmanager
def disk(path: Path) -> Generator[None]:
    """Turns a full disk, a full quota or a missing permission into a message that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free
            raise RunError(
                f"the disk is full: {path} could not be written ({free / 1e6:,.0f} MB free). What was there before is "
                "untouched: make room and go on"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunError(f"no permission to write {path}: choose another folder, or change its rights") from error
        raise RunError(f"{path} could not be written: {error.strerror or error}") from error


@contextmanager
def whole_folder(path: Path) -> Generator[Path]:
    """A temporary folder beside ``path`` that becomes ``path`` when the block ends well, and vanishes otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with disk(path):
            temporary.mkdir(parents=True)
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync(temporary)
            if path.exists():
                shutil.rmtree(path)
            temporary.rename(path)
            _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Delete what a killed process left half written in ``folder``; only for who has it to himself."""
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Files and folders that are whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from alcoda import files
from alcoda.errors import RunError


def test_write_text_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"a": "ü"})
    assert files.read_json(path) == {"a": "ü"} and "ü" in path.read_text(encoding="utf-8")
    files.write_text(path, "[1]\n")
    assert files.read_json(path) == [1] and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_refusing_disk_is_explained(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    says = {
        errno.EIO: "could not be written: Input/output error",
        errno.EACCES: "no permission",
        errno.EROFS: "no permission",
    }
    for write in (lambda: files.write_text(path, "new"), lambda: folder(path.with_name("f"))):
        with pytest.raises(RunError, match=says.get(code, "the disk is full")) as caught:
            write()
        assert str(tmp_path) in str(caught.value)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def folder(path: Path, text: str = "x", crash: bool = False) -> None:
    with files.whole_folder(path) as temporary:
        (temporary / "file").write_text(text)
        if crash:
            raise ZeroDivisionError


def test_whole_folder(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    folder(path)
    folder(path, "y")
    with pytest.raises(ZeroDivisionError):
        folder(path, "z", crash=True)
    assert (path / "file").read_text() == "y" and list(path.parent.iterdir()) == [path]


def test_read_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"a": ')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for name in ("cut.json", "binary.json", "gone.json"):
        with pytest.raises(RunError, match=rf"{name} cannot be read"):
            files.read_json(tmp_path / name)


def test_what_was_abandoned_is_removed_and_nothing_else(tmp_path: Path) -> None:
    folder(tmp_path / "kept")
    for name in (".kept.1.tmp", ".other.22.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("half")
    (tmp_path / ".run.json.3.tmp").write_text("half")
    (tmp_path / "mine.tmp").write_text("mine")
    (tmp_path / ".lock").write_text("7")
    files.remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "kept", "mine.tmp"]
    files.remove_abandoned(tmp_path / "gone")


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert files.sha256(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

"""stderr, for as long as somebody reads it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast


class Stderr(io.TextIOBase):
    """What is told goes to `sys.stderr`; where its reader is gone (a closed pipe, a lost terminal, a log file on a full
    disk) to nobody: that is no reason to end hours of work, which is kept in files."""

    @property
    def encoding(self) -> str:  # pyrefly: ignore
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._or_unheard(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._or_unheard(lambda: self._stream.flush())

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def _stream(self) -> Any:
        """Not rich's stand-in for it while a bar is shown: that one would write to us."""
        return getattr(sys.stderr, "rich_proxied_file", sys.stderr)

    def _or_unheard(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError:
            # The descriptor, not the object: what it still holds in its buffer would fail once more at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)


STDERR = cast(TextIO, Stderr())

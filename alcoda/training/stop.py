"""Stopping at the border of a step: signals become a flag that the training loop looks at."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def stop_on_signal(speaks: bool = True) -> Generator[threading.Event]:
    """Set by the first SIGINT, SIGTERM or SIGHUP (a closed terminal); a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def handle(number: int, frame: Any) -> None:
        stop.set()
        if speaks:
            # Past Python's own buffers, which the interrupted code may be writing to.
            with suppress(OSError):  # a terminal that is gone
                os.write(2, b"stopping after this step, with a checkpoint; once more to stop at once\n")
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

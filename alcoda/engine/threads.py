"""How many of torch's threads a launch is given."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch

TRIES = 4
"""Launches of a kind that each number of threads is tried in, first of all."""
AGAIN = 64
"""Of so many launches one tries what was slower before: machines get busy, and calm again."""
WEIGHT = 0.25
"""Of the newest launch in what is expected of the next."""

_KNOWN: WeakKeyDictionary[Any, Threads] = WeakKeyDictionary()


def threads_for(model: object) -> Threads:
    """What is known of a model's launches, from one engine of it to the next."""
    most = torch.get_num_threads()
    found = _KNOWN.get(model)
    if found is None or found.numbers[-1] != most:
        found = _KNOWN[model] = Threads(most)
    return found


class Threads:
    """Finds how many threads are fastest, by trying: one where kernels are so small that to wake a second thread takes
    longer than it saves (launches of few rows), all where they are not (prompts). It differs from machine to machine.

    Args:
        most: threads there are.
    """

    def __init__(self, most: int) -> None:
        # 1, 4, 16 and so on: between them the times differ little.
        self.numbers = [*(4**i for i in range(most.bit_length()) if 4**i < most), most]
        self._seconds: dict[Hashable, dict[int, float]] = {}
        self._runs: dict[Hashable, int] = {}

    def pick(self, kind: Hashable) -> int:
        """For the next launch of a kind."""
        seconds, n = self._seconds.get(kind, {}), self._runs.get(kind, 0)
        if len(self.numbers) == 1 or n < TRIES * len(self.numbers):
            return self.numbers[n % len(self.numbers)]
        if n % AGAIN == 0:
            return self.numbers[n // AGAIN % len(self.numbers)]
        return min(seconds, key=lambda number: seconds[number])

    def took(self, kind: Hashable, number: int, seconds: float) -> None:
        """A launch of a kind took so long with so many threads."""
        known, n = self._seconds.setdefault(kind, {}), self._runs.get(kind, 0)
        self._runs[kind] = n + 1
        if number not in known or n < TRIES * len(self.numbers):
            known[number] = min(seconds, known.get(number, seconds))  # the first ones also find their way
        else:
            known[number] += WEIGHT * (seconds - known[number])

    @contextmanager
    def launch(self, kind: str, rows: int) -> Iterator[None]:
        """A launch of some rows, with as many threads as are fastest; behind it there are as many as before."""
        if len(self.numbers) == 1:
            yield
            return
        before, like = torch.get_num_threads(), (kind, rows.bit_length())
        number = self.pick(like)
        torch.set_num_threads(number)
        began = perf_counter()
        try:
            yield
            self.took(like, number, perf_counter() - began)
        finally:
            torch.set_num_threads(before)

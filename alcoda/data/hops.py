"""The corpus form ``hops``: pointer chasing, text whose answers need a known number of dependent steps.

    hops: B C; A B; D A; C D? A 2 C? D 1 A? B 3 A? C 1 D

A document is one cycle over all its nodes, as links "source target" in random order, then questions "start hops
answer". One cycle, longer than the largest number of hops: with several, the answer is often the start itself, and the
number of hops may be taken modulo a short one (docs/LOG.md). Every node is asked from once before any is asked from
again, so that no answer stands in the text already. Nodes are capital letters after a space, as numbers are: with the
project's byte-level BPE each is one token, the same in links and questions.

What is drawn is integer arithmetic (shuffle.py), so the text is the same everywhere.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from alcoda.config import Config, NonNegativeFloat, NonNegativeInt, PositiveInt, validate
from alcoda.data.corpora import Corpus, form
from alcoda.data.shuffle import permutation, uniform
from alcoda.errors import UsageError

_FORMAT = 1
"""Raised when the same options come to mean other text."""
_KEY = 0x40B5
_NAMES = string.ascii_uppercase
_LINKS = re.compile(rb"hops:((?: [A-Z] [A-Z];)* [A-Z] [A-Z])((?:\? [A-Z] \d{1,2} [A-Z])*)")
_QUESTION = re.compile(rb"\? ([A-Z]) (\d+)( [A-Z])")


class HopsOptions(Config):
    """The options of ``hops:name=value,name=value``."""

    nodes: PositiveInt = Field(default=9, le=len(_NAMES))
    """Nodes of a document, its links too; the first letters of the alphabet."""
    hops: PositiveInt = 8
    """The largest number of hops that is asked; less than nodes."""
    queries: PositiveInt | None = None
    """Questions of a document; as many as nodes where not set."""
    docs: PositiveInt = 20_000
    """Documents."""
    seed: NonNegativeInt = 0
    """Of the documents."""
    skew: NonNegativeFloat = 0.0
    """The share of questions of h hops is as 1 / h^skew: 0 asks all alike, more asks few hops more often."""

    @model_validator(mode="after")
    def _no_way_round(self) -> Self:
        if self.hops >= self.nodes:
            raise ValueError(
                f"hops={self.hops} with nodes={self.nodes}: as many hops as nodes lead back to the start, so hops is "
                f"to be less than nodes; lower hops to {self.nodes - 1} or raise nodes"
            )
        return self


@form("hops")
class Hops(Corpus):
    """Generated documents of pointer chasing; nothing is read."""

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        self.options = validate(HopsOptions, _parse(spec, rest), f"corpus {spec!r}")
        self.name = self.form
        # All documents are as long, but for numbers of two digits.
        self.n_bytes = self.options.docs * len(_document(self.options, 0))

    def content_hash(self) -> str:
        what = f"{self.form} {_FORMAT} {self.options.model_dump_json()}"
        return hashlib.sha256(what.encode()).hexdigest()

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for number in range(self.options.docs):
            yield _document(self.options, number)


def _parse(spec: str, rest: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for part in rest.split(",") if rest else ():
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not name or not equals or name in found:
            raise UsageError(
                f"corpus {spec!r}: {part.strip()!r} is given twice or is no option; write options as "
                "hops:nodes=9,hops=8,docs=20000"
            )
        try:
            found[name] = int(text)
        except ValueError:
            try:
                found[name] = float(text)
            except ValueError:
                raise UsageError(f"corpus {spec!r}: {name}={text} is no number") from None
    return found


def _document(options: HopsOptions, number: int) -> str:
    n, n_queries = options.nodes, options.queries or options.nodes
    key = (_KEY, options.seed, number)
    cycle, places = permutation(n, *key, 0), np.zeros(n, np.int64)
    places[cycle] = np.arange(n)
    links = [f" {_NAMES[cycle[i]]} {_NAMES[cycle[(i + 1) % n]]}" for i in permutation(n, *key, 1).tolist()]
    rounds = [permutation(n, *key, 2, turn) for turn in range(-(-n_queries // n))]
    starts = np.concatenate(rounds)[:n_queries]
    below = np.cumsum(np.arange(1, options.hops + 1) ** -options.skew)
    hops = 1 + np.searchsorted(below / below[-1], uniform(n_queries, *key, 3), side="right")
    ends = cycle[(places[starts] + hops) % n]
    asked = zip(starts.tolist(), hops.tolist(), ends.tolist(), strict=True)
    return "hops:" + ";".join(links) + "".join(f"? {_NAMES[a]} {h} {_NAMES[b]}" for a, h, b in asked)


class Answer(NamedTuple):
    """Where an answer stands: bytes ``start .. stop`` of the text, its space too (with BPE one token), and its hops."""

    start: int
    stop: int
    hops: int


def answers(text: str | bytes) -> list[Answer]:
    """The answers in ``text`` in their order. Only those that the links of their document give; other text has none."""
    raw = text.encode() if isinstance(text, str) else text
    found = []
    for document in _LINKS.finditer(raw):
        target = {link[1:2]: link[3:4] for link in document[1].split(b";")}
        for asked in _QUESTION.finditer(document[2]):
            node, hops = asked[1], int(asked[2])
            for _ in range(hops):
                node = target.get(node)
            if node == asked[3].strip():
                start, stop = asked.span(3)
                found.append(Answer(document.start(2) + start, document.start(2) + stop, hops))
    return found

"""The corpus form ``hops``: pointer chasing, text whose answers need a known number of dependent steps.

    hops: B C; A B; D A; C D? 2 A C? 1 D A? 3 B A? 1 C D

A document is one cycle over all its nodes, as links "source target" in random order, then questions "hops start
answer". One cycle, longer than the largest number of hops: with several, the answer is often the start itself, and the
number of hops may be taken modulo a short one. No question is asked twice, and every node is asked from once before any
is asked from again, so that an earlier answer seldom shortens a later one. A start stands right before its answer, as a
source before its target: one hop is then what induction does, which a model learns first.

With ``ends``, links are definitions, each after that of its target, and a question "start end" asks where that leads:

    hops: B C; A B; D C? D C? A C? B C

``ends`` of the letters are never defined, and each is where one chain leads: every other letter is defined by the last
of a chain, drawn anew each time from those that are not ``hops`` links long yet. The number of hops is not told: more
than are needed change nothing, so an answer is a fixed point. And what a letter leads to can be worked out where it is
defined, from where its target was, a link a loop; a model learns that in minutes, where the questions above take it
through links in any order (docs/LOG.md).

Nodes are capital letters after a space, as numbers are: with the project's byte-level BPE each is one token, the same
in links and questions, and a document with its end-of-text token is ``3 nodes + 4 queries + 2`` tokens, or with ends
``3 (nodes - ends) + 3 queries + 2``. Best that is ``seq_len``: each row of a batch is then one document (``mix_unit:
row``). A row of several holds the same letters with other links, and a document that is cut leaves questions without
theirs.
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
from alcoda.data.shuffle import hashes
from alcoda.errors import UsageError

_FORMAT = 1
"""Raised when the same options come to mean other text."""
_KEY = 0x40B5
_BLOCK = 256
"""Documents that are drawn together; other sizes give other documents."""
_NAMES = string.ascii_uppercase
_LINKS = re.compile(rb"hops:((?: [A-Z] [A-Z];)* [A-Z] [A-Z])((?:\?(?: \d{1,2})? [A-Z] [A-Z])*)")
_QUESTION = re.compile(rb"\?(?: (\d+))? ([A-Z])( [A-Z])")


class HopsOptions(Config):
    """The options of ``hops:name=value,name=value``."""

    nodes: PositiveInt = Field(default=9, le=len(_NAMES))
    """Nodes of a document, its links too; the first letters of the alphabet."""
    hops: PositiveInt = 8
    """The largest number of hops that is asked; less than nodes."""
    ends: PositiveInt | None = None
    """Nodes that are never defined; then links are definitions, and questions are of where they lead."""
    queries: PositiveInt | None = None
    """Questions of a document; as many as nodes where not set. All different; but with ends, as many as nodes that are
    defined, and where more are set, all are asked once before any is asked again."""
    docs: PositiveInt = 20_000
    """Documents."""
    seed: NonNegativeInt = 0
    """Of the documents."""
    skew: NonNegativeFloat = 0.0
    """The share of questions of h hops is as 1 / h^skew: 0 asks all alike, more asks few hops more often."""

    @model_validator(mode="after")
    def _no_way_round(self) -> Self:
        if self.ends is not None:
            return self._fit_chains(self.nodes - self.ends, self.ends)
        if self.hops >= self.nodes:
            raise ValueError(
                f"hops={self.hops} with nodes={self.nodes}: as many hops as nodes lead back to the start, so hops is "
                f"to be less than nodes; lower hops to {self.nodes - 1} or raise nodes"
            )
        if self.n_queries > self.nodes * self.hops:
            raise ValueError(
                f"queries={self.n_queries} with nodes={self.nodes} and hops={self.hops}: there are only "
                f"{self.nodes * self.hops} different questions; lower queries"
            )
        return self

    def _fit_chains(self, n_defined: int, n_ends: int) -> Self:
        what = f"nodes={self.nodes} and ends={n_ends}: {max(n_defined, 0)} nodes are defined"
        if self.hops > n_defined:
            raise ValueError(f"hops={self.hops} with {what}, too few for so many hops; lower hops or ends")
        if n_defined > n_ends * self.hops:
            raise ValueError(f"hops={self.hops} with {what}, too many for chains so short; raise hops or ends")
        if self.skew:
            raise ValueError(f"skew={self.skew:g} with ends: every defined node is asked for alike; leave skew out")
        return self

    @property
    def n_queries(self) -> int:
        """Questions of a document."""
        return self.queries or self.nodes - (self.ends or 0)


@form("hops")
class Hops(Corpus):
    """Generated documents of pointer chasing; nothing is read."""

    has_answers = True

    def __init__(self, spec: str, rest: str) -> None:
        super().__init__(spec, rest)
        options = _parse(spec, rest)
        try:
            self.options = validate(HopsOptions, options, "it")
        except UsageError as error:
            raise UsageError(f"corpus {spec!r}: {error}") from None
        self.name = self.form
        # All are as long, but for numbers of two digits.
        self.n_bytes = self.options.docs * len(_block(self.options, 0)[0])

    def content_hash(self) -> str:
        others = {"ends"} if self.options.ends is None else set()
        what = f"{self.form} {_FORMAT} {self.options.model_dump_json(exclude=others)}"
        return hashlib.sha256(what.encode()).hexdigest()

    def asked(self, document: bytes) -> list[tuple[int, int]]:
        """The answers of the most hops: fewer are those of an earlier stage."""
        return [(start, stop) for start, stop, hops in answers(document) if hops == self.options.hops]

    def _documents(self, max_bytes: int | None) -> Iterator[str]:
        for start in range(0, self.options.docs, _BLOCK):
            yield from _block(self.options, start // _BLOCK)[: self.options.docs - start]


def _parse(spec: str, rest: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for part in rest.split(",") if rest else ():
        name, equals, text = (piece.strip() for piece in part.partition("="))
        if not name or not equals or name in found:
            raise UsageError(
                f"corpus {spec!r}: {part.strip()!r} is no option, or given twice; write options as "
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


def _block(options: HopsOptions, block: int) -> list[str]:
    """Documents ``block * _BLOCK`` and on: made many at a time, because arrays of nine numbers are slow."""
    return _cycles(options, block) if options.ends is None else _chains(options, options.ends, block)


def _chains(options: HopsOptions, n_ends: int, block: int) -> list[str]:
    n = options.nodes
    n_rounds = -(-options.n_queries // (n - n_ends))
    drawn_MX = hashes(_BLOCK * n * (1 + n + n_rounds), _KEY, options.seed, block).reshape(_BLOCK, -1, n)
    name_MN = np.argsort(drawn_MX[:, 0], axis=1, kind="stable")
    orders_MKN = np.argsort(drawn_MX[:, 1 + n :], axis=2, kind="stable")
    asked_MQ = orders_MKN[orders_MKN >= n_ends].reshape(_BLOCK, -1)[:, : options.n_queries]
    end_MN, target_MN = np.zeros((_BLOCK, n), np.int64), np.zeros((_BLOCK, n), np.int64)
    length_ME, last_ME = np.zeros((_BLOCK, n_ends), np.int64), np.tile(np.arange(n_ends), (_BLOCK, 1))
    end_MN[:, :n_ends] = last_ME
    for i in range(n_ends, n):
        drawn_ME = np.where(length_ME < options.hops, drawn_MX[:, 1 + i, :n_ends] | np.uint64(1), np.uint64(0))
        picked_M = (np.arange(_BLOCK), drawn_ME.argmax(1))
        end_MN[:, i], target_MN[:, i] = picked_M[1], last_ME[picked_M]
        length_ME[picked_M] += 1
        last_ME[picked_M] = i

    def named(nodes: np.ndarray) -> list[list[int]]:
        return np.take_along_axis(name_MN, nodes, 1).tolist()

    links = zip(name_MN[:, n_ends:].tolist(), named(target_MN[:, n_ends:]), strict=True)
    asked = zip(named(asked_MQ), named(np.take_along_axis(end_MN, asked_MQ, 1)), strict=True)
    return [
        f"hops:{';'.join(_pairs(*pair))}?{'?'.join(_pairs(*query))}" for pair, query in zip(links, asked, strict=True)
    ]


def _cycles(options: HopsOptions, block: int) -> list[str]:
    n, n_hops, n_queries = options.nodes, options.hops, options.n_queries
    n_rounds = -(-n_queries // n)
    drawn_MX = hashes(_BLOCK * n * (2 + n_rounds + n_hops), _KEY, options.seed, block).reshape(_BLOCK, -1)
    orders_MKN = np.argsort(drawn_MX[:, : -n * n_hops].reshape(_BLOCK, -1, n), axis=2, kind="stable")
    cycle_MN, places_MN = orders_MKN[:, 0], np.argsort(orders_MKN[:, 0], axis=1)
    shown_MN, starts_MQ = orders_MKN[:, 1], orders_MKN[:, 2:].reshape(_BLOCK, -1)[:, :n_queries]
    # Of each start, the numbers of hops in a random order: clocks of these rates (the shares) ring one after another.
    uniform_MNH = ((drawn_MX[:, -n * n_hops :] >> np.uint64(11)) * 2.0**-53).reshape(_BLOCK, n, n_hops)
    clocks_MNH = -np.log1p(-uniform_MNH) * np.arange(1, n_hops + 1) ** options.skew
    order_MNH = 1 + np.argsort(clocks_MNH, axis=2, kind="stable")
    hops_MQ = order_MNH[np.arange(_BLOCK)[:, None], starts_MQ, np.arange(n_queries) // n]

    def after(starts: np.ndarray, hops: np.ndarray | int) -> np.ndarray:
        return np.take_along_axis(cycle_MN, (np.take_along_axis(places_MN, starts, 1) + hops) % n, 1)

    links = zip(shown_MN.tolist(), after(shown_MN, 1).tolist(), strict=True)
    asked = zip(starts_MQ.tolist(), hops_MQ.tolist(), after(starts_MQ, hops_MQ).tolist(), strict=True)
    return [_text(*pair, *query) for pair, query in zip(links, asked, strict=True)]


def _pairs(firsts: list[int], seconds: list[int]) -> Iterator[str]:
    return (f" {_NAMES[a]} {_NAMES[b]}" for a, b in zip(firsts, seconds, strict=True))


def _text(sources: list[int], targets: list[int], starts: list[int], hops: list[int], ends: list[int]) -> str:
    asked = (f"? {h} {_NAMES[a]} {_NAMES[b]}" for a, h, b in zip(starts, hops, ends, strict=True))
    return f"hops:{';'.join(_pairs(sources, targets))}{''.join(asked)}"


class Answer(NamedTuple):
    """Where an answer stands: bytes ``start .. stop`` of the text, its space too (with BPE one token), and its hops."""

    start: int
    stop: int
    hops: int


def answers(text: str | bytes) -> list[Answer]:
    """The answers in ``text`` in their order. Only those that the links of their document give, the first time that it
    gives them; other text has none."""
    raw = text.encode() if isinstance(text, str) else text
    found = []
    for document in _LINKS.finditer(raw):
        target = {link[1:2]: link[3:4] for link in document[1].split(b";")}
        given = set()
        for asked in _QUESTION.finditer(document[2]):
            hops, node = 0, asked[2]
            most = len(target) if asked[1] is None else int(asked[1])  # more, without a number, is a way round
            while hops < most and node in target:
                hops, node = hops + 1, target[node]
            is_there = hops > 0 and node not in target if asked[1] is None else hops == most
            if is_there and node == asked[3].strip() and asked[0] not in given:
                given.add(asked[0])
                start, stop = asked.span(3)
                found.append(Answer(document.start(2) + start, document.start(2) + stop, hops))
    return found

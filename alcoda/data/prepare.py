"""From a data config to tokens that can be trained on: corpora, tokenizer, cache, splits, in this order."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from alcoda.data.batches import Batches, BatchState, Unit
from alcoda.data.cache import cache_root, explained, key_of, tokenise
from alcoda.data.config import DataConfig, Ladder, Source
from alcoda.data.corpora import FORMS, Corpus, FileCorpus, corpus
from alcoda.data.shuffle import uniform
from alcoda.data.splits import TRAIN, Plan, Stream, plan, split, whole
from alcoda.data.tokenizer import Tokenizer
from alcoda.data.vocabulary import Bpe, TokenizerConfig
from alcoda.errors import UsageError
from alcoda.progress import bar

_TRAINED_FORMAT = 2
_LONGEST_RUN = 1000
_RUN = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN + 1},}}|(?<!\s)\s{{{_LONGEST_RUN + 1},}}")
"""Characters without white space, or white space, that a tokenizer is trained on in pieces."""
_KEY = 0x70C3


@dataclass(frozen=True, eq=False)
class SourceData:
    """One corpus, tokenised and split."""

    name: str
    weight: float
    splits: dict[str, Stream]
    spec: str
    content_hash: str


@dataclass(frozen=True, eq=False)
class Data:
    """All that a run reads: see `prepare`."""

    tokenizer: Tokenizer
    sources: tuple[SourceData, ...]
    """What is trained on."""
    valid: SourceData | None
    """The corpus of its own to measure on, where the config names one; its only split is ``valid``."""
    mix_unit: Unit
    ladders: tuple[Ladder, ...]
    """Which of the sources follow one another."""
    notes: tuple[str, ...]
    """What the user should know: a corpus that was cut, a smaller vocabulary, documents that are trained on too, ..."""
    _all: tuple[SourceData, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_all", self.sources + ((self.valid,) if self.valid else ()))

    def split(self, name: str) -> dict[str, Stream]:
        """The split ``name`` (train, valid, calib, probe) of each source that has one, by the source's name.

        Of a ladder, all sources are trained on, and the last is what is measured.
        """
        before = {i for ladder in self.ladders for i in ladder.sources[:-1]} if name != TRAIN else set()
        kept = [source for i, source in enumerate(self._all) if i not in before]
        found = {source.name: source.splits[name] for source in kept if name in source.splits}
        if not found:
            allowed = ", ".join(dict.fromkeys(part for source in self._all for part in source.splits))
            raise UsageError(f"split {name!r}: there is none of that name. Allowed: {allowed}")
        return found

    def batches(self, batch_size: int, seq_len: int, seed: int, state: BatchState | None = None) -> Batches:
        """Batches of the train split, mixed by weight: see `Batches`."""
        sources = [(source.name, source.weight, source.splits[TRAIN]) for source in self.sources]
        ladders = [ladder.sources for ladder in self.ladders]
        return Batches(sources, batch_size, seq_len, seed, self.mix_unit, state, ladders)

    def describe(self) -> dict[str, Any]:
        """What was read, for the record of a run. JSON."""
        tokenizer = self.tokenizer
        return {
            "tokenizer": {
                "kind": tokenizer.kind,
                "vocab_size": tokenizer.vocab_size,
                "eot": tokenizer.eot_text,
                "sha256": tokenizer.sha256,
            },
            "sources": [
                {
                    "name": source.name,
                    "corpus": source.spec,
                    "weight": source.weight,
                    "content_hash": source.content_hash,
                    "splits": {
                        part: {
                            "tokens": stream.n_tokens,
                            "documents": stream.n_documents,
                            "bytes": stream.n_bytes,
                        }
                        for part, stream in source.splits.items()
                    },
                }
                for source in self._all
            ],
            "notes": list(self.notes),
        }


def prepare(config: DataConfig, tokenizer: Tokenizer | None = None) -> Data:
    """Read, tokenise and split what ``config`` names. ``tokenizer``, of a checkpoint, takes the place of the config's.

    A tokenizer that is trained sees documents of the train split only. Everything slow is cached (see `cache`).
    Raises UsageError and RunError.
    """
    sources = config.sources
    corpora = [corpus(source.corpus) for source in sources]
    valid = None if config.valid is None else corpus(config.valid)
    for one in (corpora[i] for ladder in config.ladders for i in ladder.sources):
        if not one.has_answers:
            raise UsageError(
                f"mix: corpus {one.spec!r} is a stage, and its text has no answers that tell when it is mastered. "
                f"Forms that have: {', '.join(name for name, kind in FORMS.items() if kind.has_answers)}"
            )
    names = _names(sources, corpora, valid)
    hashes, valid_hash = _hashes(corpora, valid)
    if tokenizer is None:
        tokenizer = _tokenizer(config, corpora, hashes, valid)
    notes = []
    if (
        isinstance(config.tokenizer, Bpe)
        and tokenizer.kind == "bpe"
        and tokenizer.vocab_size < config.tokenizer.vocab_size
    ):
        notes.append(
            f"tokenizer: the text gave only {tokenizer.vocab_size} of the {config.tokenizer.vocab_size} tokens asked"
        )
    data = []
    for source, one, name, content in zip(sources, corpora, names, hashes, strict=False):
        one.name = name
        store = tokenise(one, tokenizer, source.max_bytes)
        parts, note = split(store, _fractions(config), config.seed)
        notes += [*store.notes, *([note] if note else [])]
        data.append(SourceData(name, source.weight, parts, source.corpus, content))
    own = None
    if valid is not None and valid_hash is not None:
        valid.name = names[-1]
        store = tokenise(valid, tokenizer, config.max_bytes)
        notes += store.notes
        own = SourceData(valid.name, 0.0, {"valid": whole(store)}, valid.spec, valid_hash)
    notes += _repeated(data, own)
    return Data(tokenizer, tuple(data), own, config.mix_unit, config.ladders, tuple(notes))


def open_corpus(spec: str, tokenizer: Tokenizer, max_bytes: int | None = None) -> Stream:
    """All of the corpus ``spec`` (its first ``max_bytes`` bytes), to evaluate on."""
    one = corpus(spec)
    kind = TokenizerConfig.choices.get(tokenizer.kind)
    if not one.has_text and kind is not None and issubclass(kind, TokenizerConfig) and not kind.given:
        raise UsageError(
            f"corpus {spec!r} is tokens already, and tokenizer {tokenizer.kind!r} did not make them; give the text "
            "that they were made from (text:PATH), or a model with the tokenizer that did"
        )
    return whole(tokenise(one, tokenizer, max_bytes))


def _hashes(corpora: Sequence[Corpus], valid: Corpus | None) -> tuple[list[str], str | None]:
    """The content hash of each corpus. Refuses text that is there twice: held out of one, it is trained on in another.

    Each source is split by itself, so only whole corpora and files are compared here; for documents see `_repeated`.
    """
    every = [*corpora, *([valid] if valid else [])]
    files = [{path.resolve() for path in one.files} if isinstance(one, FileCorpus) else set() for one in every]
    for (i, a), (j, b) in combinations(enumerate(every), 2):
        if shared := files[i] & files[j]:
            raise _twice(a, b, valid, f"{min(shared)} is in both")
    hashes = [one.content_hash() for one in every]
    for (i, a), (j, b) in combinations(enumerate(every), 2):
        if hashes[i] == hashes[j]:
            raise _twice(a, b, valid, "they hold the same")
    return hashes[: len(corpora)], None if valid is None else hashes[-1]


def _twice(a: Corpus, b: Corpus, valid: Corpus | None, why: str) -> UsageError:
    if b is valid:
        return UsageError(
            f"valid: {b.spec!r} is trained on too, as {a.spec!r} ({why}); name another corpus, or leave valid out"
        )
    return UsageError(
        f"mix: {a.spec!r} and {b.spec!r} overlap ({why}), so what is held out of one would be trained on in the other; "
        "name the text once (weight says how often it is read), or move the files of one elsewhere"
    )


def _repeated(sources: Sequence[SourceData], valid: SourceData | None) -> list[str]:
    """A note on the validation documents that are in the training text too, if there are any."""
    held = np.concatenate([one.splits["valid"].hashes() for one in ([valid] if valid else sources)])
    trained = np.concatenate([one.splits[TRAIN].hashes() for one in sources])
    n = int(np.isin(held, trained).sum())
    if not n:
        return []
    return [
        f"{n:,} of {len(held):,} validation documents are also in the training text, word for word, so that results on "
        "them are too good; where they are many, remove what the corpus holds twice"
    ]


def _fractions(config: DataConfig) -> dict[str, float]:
    fractions = {"valid": config.splits.valid, "calib": config.splits.calib, "probe": config.splits.probe}
    if config.valid is not None:
        del fractions["valid"]
    return fractions


def _names(sources: Sequence[Source], corpora: Sequence[Corpus], valid: Corpus | None) -> list[str]:
    """A name for each source, and one for ``valid``: as given, or made from the corpus and told apart by a number."""
    given = Counter(source.name for source in sources if source.name is not None)
    twice = [name for name, n in given.items() if n > 1]
    if twice:
        raise UsageError(f"mix: the name {twice[0]!r} is given to {given[twice[0]]} sources; each needs its own")
    names, taken = [], set(given)
    wanted = [(source.name, one.name) for source, one in zip(sources, corpora, strict=True)]
    for name, short in [*wanted, *([(None, valid.name)] if valid else [])]:
        if name is None:
            numbered = (f"{short}-{n}" for n in range(2, len(sources) + 3))
            name = short if short not in taken else next(text for text in numbered if text not in taken)
            taken.add(name)
        names.append(name)
    return names


def _tokenizer(config: DataConfig, corpora: Sequence[Corpus], hashes: Sequence[str], valid: Corpus | None) -> Tokenizer:
    kind = config.tokenizer
    tokens = next((one for one in (*corpora, *([valid] if valid else [])) if not one.has_text), None)
    if tokens is not None and not kind.given:
        raise UsageError(
            f"corpus {tokens.spec!r} is tokens already, and tokenizer {kind.kind!r} did not make them; give the one "
            "that did: tokenizer: {kind: file, path: tokenizer.json}"
        )
    if not kind.trained:
        return kind.build()
    # What of each source it sees, and how much of that, follows from these.
    made_from = [(content, s.max_bytes, s.weight) for content, s in zip(hashes, config.sources, strict=True)]
    key = key_of("tokenizer", _TRAINED_FORMAT, kind.model_dump(), made_from, _fractions(config), config.seed)
    path = cache_root() / "tokenizers" / f"{key}.json"
    with contextlib.suppress(UsageError):  # not there, or damaged: trained anew
        return Tokenizer.load(path, kind=kind.kind)
    tokenizer = kind.build(_training_text(config, corpora, getattr(kind, "train_bytes", None)))
    with explained("the tokenizer"):
        tokenizer.save(path)
    # Read back, so that a run that trained it and one that found it have the same.
    return Tokenizer.load(path, kind=kind.kind)


def _training_text(config: DataConfig, corpora: Sequence[Corpus], train_bytes: int | None) -> Iterator[str]:
    """Text of the train split: about ``train_bytes`` of it, in the shares of the weights, drawn from all over it."""
    weights = sum(source.weight for source in config.sources)
    for i, (source, one) in enumerate(zip(config.sources, corpora, strict=True)):
        with bar(f"reading {one.name}", one.n_bytes) as advance:
            sizes = []
            for text in one.documents(source.max_bytes):
                sizes.append(len(text.encode()))
                advance(sizes[-1])
        sizes_M = np.array(sizes, np.int64)
        how = plan(sizes_M, _fractions(config), config.seed, one.name)
        left = int(sizes_M.sum()) if train_bytes is None else int(train_bytes * source.weight / weights)
        with bar(f"training the tokenizer on {one.name}", min(left, int(sizes_M.sum()))) as advance:
            for text in _train_documents(one, source.max_bytes, how, sizes_M, left, (_KEY, config.seed, i)):
                advance(len(text.encode()))
                yield from _short_runs(text)


def _short_runs(text: str) -> Iterator[str]:
    """``text`` in pieces, so that no word is very long: the time to train on a word grows with its square."""
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + _LONGEST_RUN, run.end(), _LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


def _train_documents(
    one: Corpus, max_bytes: int | None, how: Plan, sizes_M: np.ndarray, left: int, key: tuple[int, ...]
) -> Iterator[str]:
    """Documents of the train part, of which ``left`` bytes are taken, at random where there are more."""
    if how.labels_M is None:
        takes_M = np.clip(how.cuts_bytes[1] - (np.cumsum(sizes_M) - sizes_M), 0, sizes_M)
    else:
        takes_M = np.where(how.labels_M == 0, sizes_M, 0)
    share = left / max(1, int(takes_M.sum()))
    drawn_M = uniform(len(sizes_M), *key) < share
    if len(sizes_M) < 100 and share < 1:
        # Too few to draw from: the beginning of each.
        takes_M, drawn_M = (takes_M * share).astype(np.int64), np.ones(len(sizes_M), bool)
    for text, take, drawn in zip(one.documents(max_bytes), takes_M.tolist(), drawn_M.tolist(), strict=True):
        if not drawn or not take:
            continue
        head = text.encode()[: min(take, left)].decode(errors="ignore")
        left -= len(head.encode())
        if head:
            yield head
        if left <= 0:
            return

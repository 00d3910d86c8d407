"""Every decode cache on one text: what one slot for all loops costs in bits per byte, and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from alcoda import progress
from alcoda.errors import UsageError
from alcoda.measure.compare import Bits
from alcoda.measure.evaluate import rows_at_a_time
from alcoda.measure.text import Sums, Text, joined
from alcoda.model.cache_policy import PER_LOOP, CachePolicy, caches, pick_cache
from alcoda.model.cost import ledger
from alcoda.model.prefill import ExactPrefill, Reading
from alcoda.training.load import LoadedRun
from alcoda.training.score import score


@dataclass(frozen=True)
class CacheScore:
    """One decode cache.

    Attributes:
        name: its kind.
        cache: its kind and fields.
        loss: mean nats a scored token.
        bits: bits per byte, and their gap to `per_loop`.
        bytes_per_token: of the cache, by the ledger, in bf16; None where the ledger does not know the choice by name.
        read_s: seconds that reading the text took, token by token, the head left out.
        s_per_token: of the text.
    """

    name: str
    cache: dict[str, Any]
    loss: float
    bits: Bits
    bytes_per_token: int | None
    read_s: float
    s_per_token: float


@dataclass(frozen=True)
class CachesResult:
    """What `evaluate_caches` measured.

    Attributes:
        data: a split of the run (``valid``) or a corpus.
        train_step: of the checkpoint.
        loops: the depth.
        batch_size: rows read at a time, on which the times depend.
        unit, n_units, n_tokens, n_bytes, note: as of `alcoda.measure.evaluate.EvalResult`.
        by_cache: `per_loop` first.
    """

    data: str
    train_step: int
    loops: int
    batch_size: int
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str | None
    by_cache: tuple[CacheScore, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``caches.json`` and ``--json``."""
        return asdict(self)


def evaluate_caches(
    run: LoadedRun,
    loops: int | None = None,
    data: str = "valid",
    *,
    choices: Sequence[CachePolicy | str] = (),
    batch_size: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> CachesResult:
    """Score a text as decoding with each cache would: token by token, every token at ``loops`` loops.

    Args:
        run: a model with loops.
        loops: the depth; the model's ``n_loops`` where None.
        data, max_tokens, seed: as of `alcoda.measure.evaluate.evaluate`.
        choices: beside `per_loop`, which the others are held against; where empty, every registered one.
        batch_size: rows read at a time, with each in turn; None: 64.

    Raises:
        UsageError: a cache that there is not or that the model cannot have, or two of one name; and as `evaluate`.
    """
    model = run.recipe.model
    n_loops = model.check_loops(model.n_loops if loops is None else loops)
    n_rows, compared = rows_at_a_time(batch_size, is_exact=True), _per_loop_first(run, choices or list(caches()))
    # In chunks of one token with every cache, so that times are those of decoding.
    readings = [Reading(ExactPrefill(), 1, cache=one) for one in compared]
    text = Text.open(run, data, max_tokens)
    sums: list[list[Sums]] = [[] for _ in compared]
    n_read, read_s = 0, [0.0] * len(compared)
    told = f"scoring {data} with cache {', '.join(one.kind for one in compared)}"
    with progress.bar(told, text.n_tokens * len(compared)) as advance:
        for stream in text.streams.values():
            for of_cache in sums:
                of_cache.append(text.sums(stream, 1, model.seq_len))
            # Batch by batch, each in turn: what else the machine does slows all of them alike.
            passes = [
                score(
                    run.model,
                    stream,
                    run.tokenizer.token_bytes_V,
                    [n_loops],
                    batch_size=n_rows,
                    max_tokens=text.max_tokens,
                    dtype=run.dtype,
                    reading=one,
                    tell=advance,
                )
                for one in readings
            ]
            for parts in zip(*passes, strict=True):
                n_read += len(parts[0].bytes_N)
                for i, part in enumerate(parts):
                    sums[i][-1].add(part)
                    read_s[i] += part.read_s
    found = [joined(one, [n_loops], text.name, run.train_step) for one in sums]
    nats_CU, bytes_U = np.concatenate([nats_LU for nats_LU, _ in found]), found[0][1]
    n_scored, n_bytes = sum(one.n_scored for one in sums[0]), int(bytes_U.sum())
    by_name = ledger(model, n_loops).kv_bytes_by_cache
    return CachesResult(
        data=data,
        train_step=run.train_step,
        loops=n_loops,
        batch_size=n_rows,
        unit=text.unit,
        n_units=len(bytes_U),
        n_tokens=n_scored,
        n_bytes=n_bytes,
        note="; ".join([*_same(run), *text.notes(run, len(bytes_U), n_bytes)]) or None,
        by_cache=tuple(
            CacheScore(
                name=one.kind,
                cache=one.model_dump(),
                loss=float(nats_CU[i].sum()) / n_scored,
                bits=Bits.of(nats_CU, i, bytes_U, seed),
                bytes_per_token=by_name.get(one.kind),
                read_s=read_s[i],
                s_per_token=read_s[i] / n_read,
            )
            for i, one in enumerate(compared)
        ),
    )


def _same(run: LoadedRun) -> list[str]:
    keys = run.recipe.model.keys
    return [] if keys.own_keys else [f"keys {keys.kind}: all loops read one slot as it is, so every cache is the same"]


def _per_loop_first(run: LoadedRun, choices: Sequence[CachePolicy | str]) -> list[CachePolicy]:
    found = [pick_cache(one, run.recipe.model) for one in choices]
    found = [PER_LOOP, *(one for one in found if one != PER_LOOP)]
    twice = next((one for i, one in enumerate(found) if one in found[:i]), None)
    if twice is not None:
        raise UsageError(f"cache {twice.kind} is named twice with the same fields: name it once")
    return found

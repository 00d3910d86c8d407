"""Every prefill on one text: what reading faster than token by token costs in bits per byte, and what it saves."""

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
from alcoda.model.prefill import Prefill, Reading, prefills
from alcoda.training.load import LoadedRun
from alcoda.training.score import score


@dataclass(frozen=True)
class PrefillScore:
    """One prefill.

    Attributes:
        name: its kind.
        prefill: its kind and fields.
        whole: rows that it reads from end to end.
        continuation: the second half of each row, read token by token after it has read the first: what generating
            after a prompt feels.
        read_s: seconds that reading the whole rows took, the head left out.
        tokens_per_s: of text read so.
    """

    name: str
    prefill: dict[str, Any]
    whole: Bits
    continuation: Bits
    read_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class PrefillsResult:
    """What `evaluate_prefills` measured.

    Attributes:
        data: a split of the run (``valid``) or a corpus.
        train_step: of the checkpoint.
        loops: the depth.
        chunk_tokens: prefills read in chunks of so many tokens; None: whole rows, and the whole of a prompt.
        prompt_tokens: of a row, before the continuation.
        batch_size: rows read at a time, on which the times depend.
        unit, n_units, n_tokens, n_bytes, note: as of `alcoda.measure.evaluate.EvalResult`, of whole rows.
        by_prefill: exact first.
    """

    data: str
    train_step: int
    loops: int
    chunk_tokens: int | None
    prompt_tokens: int
    batch_size: int
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    note: str | None
    by_prefill: tuple[PrefillScore, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``prefills.json`` and ``--json``."""
        return asdict(self)


def evaluate_prefills(
    run: LoadedRun,
    loops: int | None = None,
    data: str = "valid",
    *,
    choices: Sequence[Prefill | str] = (),
    chunk_tokens: int | None = None,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
) -> PrefillsResult:
    """Score a text read by each prefill, and the second half of its rows after each has read the first half.

    Args:
        run: a model with a memory.
        loops: the depth; the model's ``n_loops`` where None.
        data, max_tokens, seed: as of `alcoda.measure.evaluate.evaluate`.
        choices: beside exact, which the others are held against; where empty, every registered one.
        chunk_tokens: each reads in chunks of so many tokens; None: all at once.
        batch_size: rows read at a time, by each in turn; None: 64.

    Raises:
        UsageError: a model without memory, a prefill that there is not, or two of one name; and as `evaluate`.
    """
    if not run.recipe.model.memory.carries:
        raise UsageError(
            "prefill all: this model has no memory (model.memory), so one pass reads a text exactly; leave prefill out"
        )
    n_loops = run.recipe.model.check_loops(run.recipe.model.n_loops if loops is None else loops)
    seq_len, n_rows = run.recipe.model.seq_len, rows_at_a_time(batch_size, is_exact=True)
    n_prompt = seq_len // 2
    readings = [Reading(one, chunk_tokens) for one in _exact_first(run, choices or list(prefills()))]
    after = [Reading(one.prefill, chunk_tokens, n_prompt) for one in readings if not one.prefill.is_exact]
    text = Text.open(run, data, max_tokens)
    whole: list[list[Sums]] = [[] for _ in readings]
    later: list[list[Sums]] = [[] for _ in readings]
    n_read, read_s = 0, [0.0] * len(readings)
    told = f"scoring {data} by {', '.join(one.prefill.kind for one in readings)}"
    with progress.bar(told, text.n_tokens * (len(readings) + len(after))) as advance:
        for stream in text.streams.values():
            for sums in (*whole, *later):
                sums.append(text.sums(stream, 1, seq_len))
            # Batch by batch, each reading in turn: what else the machine does slows all of them alike.
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
                for one in (*readings, *after)
            ]
            for parts in zip(*passes, strict=True):
                n_read += len(parts[0].bytes_N)
                # Exact prefill of a prompt and reading on are one exact reading: it stands for both.
                for i, (part, going_on) in enumerate(
                    zip(parts[: len(readings)], (parts[0], *parts[len(readings) :]), strict=True)
                ):
                    whole[i][-1].add(part)
                    later[i][-1].add(going_on, n_prompt)
                    read_s[i] += part.read_s
    nats_PU, bytes_U = _joined(whole, n_loops, text, run, "its tokens")
    nats_PC, bytes_C = _joined(later, n_loops, text, run, "the tokens in the second half of a row")
    n_bytes = int(bytes_U.sum())
    return PrefillsResult(
        data=data,
        train_step=run.train_step,
        loops=n_loops,
        chunk_tokens=chunk_tokens,
        prompt_tokens=n_prompt,
        batch_size=n_rows,
        unit=text.unit,
        n_units=len(bytes_U),
        n_tokens=sum(s.n_scored for s in whole[0]),
        n_bytes=n_bytes,
        note="; ".join(text.notes(run, len(bytes_U), n_bytes)) or None,
        by_prefill=tuple(
            PrefillScore(
                name=one.prefill.kind,
                prefill=one.prefill.model_dump(),
                whole=Bits.of(nats_PU, i, bytes_U, seed),
                continuation=Bits.of(nats_PC, i, bytes_C, seed),
                read_s=read_s[i],
                tokens_per_s=n_read / read_s[i],
            )
            for i, one in enumerate(readings)
        ),
    )


def _exact_first(run: LoadedRun, choices: Sequence[Prefill | str]) -> list[Prefill]:
    found = [run.prefill(one, "exact") for one in choices]
    found = [run.prefill(None, "exact"), *(one for one in found if not one.is_exact)]
    twice = next((one for i, one in enumerate(found) if one in found[:i]), None)
    if twice is not None:
        raise UsageError(f"prefill {twice.kind} is named twice with the same fields: name it once")
    return found


def _joined(
    sums: Sequence[Sequence[Sums]], n_loops: int, text: Text, run: LoadedRun, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each prefill by unit, and the units' bytes, which are those of all."""
    found = [joined(one, [n_loops], text.name, run.train_step, what) for one in sums]
    return np.concatenate([nats_LU for nats_LU, _ in found]), found[0][1]

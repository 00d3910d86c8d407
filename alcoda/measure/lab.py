"""The lab: when do the tokens of a text converge in the loop, which ones, and is what they converge to a fixed point?

`lab` streams over a text (`trajectories`), keeps a few bytes a token (`tally`), and measures the loop itself on a
sample (`contraction`). docs/lab.md says what each number means and holds the schema of ``lab.json``.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alcoda import progress
from alcoda.data.hops import answers
from alcoda.data.splits import Stream
from alcoda.depth.trajectory import NUMBERS, check_trace
from alcoda.errors import RunError, UsageError
from alcoda.files import disk, write_json
from alcoda.measure.classes import CLASSES, Scheme, check_scheme, classify, pick_scheme
from alcoda.measure.columns import Columns, parquet_file
from alcoda.measure.contraction import Contraction, Paths, contraction, path_independence
from alcoda.measure.evaluate import EvalResult, evaluate, rows_at_a_time
from alcoda.measure.tally import Group, Tally
from alcoda.measure.text import Text
from alcoda.measure.trajectories import EPS_SWEEP, ByLoop, Part, Sweep, check_finite, depths_of, trajectories
from alcoda.training.diagnose import diagnose
from alcoda.training.load import LoadedRun

TOKENS, LOOPS, EPS = 200_000, 16, 5e-4
"""Defaults: of each source, of the trajectories, and of the KL below which a loop changes nothing (Huginn's exit
threshold, papers.md 3.2)."""
ELASTICITY = (1, 2, 3, 4, 6, 8, 16, 32)
LEAST_TOKENS = 32
_SCHEMA = 1
_ELASTICITY_TOKENS = 50_000
_PATH_ROWS, _PATH_CELLS = 8, 1 << 22
_BLOCK_ROWS, _BLOCK_TOKENS = 16, 128
_PASSAGE_TOKENS = 400


@dataclass(frozen=True)
class LabResult:
    """What `lab` measured; docs/lab.md has every field.

    Attributes:
        data, train_step, unit, n_units, n_tokens, n_bytes: as of `alcoda.measure.evaluate.EvalResult`.
        loops, eps: R of the trajectories, and what a KL has to be below.
        dtype: what the passes were computed in (the head always in fp32 or finer).
        classes: the scheme of classes of each source.
        notes: what the reader should know of the numbers.
        depth: of all tokens.
        histogram: tokens by depth. by_eps: the settled depth with other eps. by_loop: means and quantiles at each loop.
        by_class, by_position, by_difficulty, by_hops: groups of tokens.
        hops_accuracy: of answers of pointer chasing, by hops: the share that is right after each loop.
        elasticity: bits per byte by uniform depth.
        paths, contraction, gates: of the loop, on a sample.
        passages: the beginning of each source, token by token.
    """

    data: str
    train_step: int
    loops: int
    eps: float
    dtype: str
    classes: dict[str, Scheme]
    unit: str
    n_units: int
    n_tokens: int
    n_bytes: int
    notes: tuple[str, ...]
    depth: Group
    histogram: list[dict[str, Any]]
    by_eps: list[dict[str, float]]
    by_loop: list[dict[str, Any]]
    by_class: tuple[Group, ...]
    by_position: tuple[Group, ...]
    by_difficulty: tuple[Group, ...]
    by_hops: tuple[Group, ...]
    hops_accuracy: dict[int, list[float]]
    elasticity: EvalResult | None
    paths: Paths
    contraction: tuple[Contraction, ...]
    gates: list[dict[str, Any]]
    passages: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """For ``lab.json`` and ``--json``."""
        return {"schema": _SCHEMA, **asdict(self)}


def lab(
    run: LoadedRun,
    data: str = "valid",
    *,
    tokens: int = TOKENS,
    loops: int = LOOPS,
    eps: float = EPS,
    classes: str = "auto",
    out: Path | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> LabResult:
    """Measure the loop on a text, and write ``lab.json`` and ``tokens.parquet``.

    Args:
        run: any recurrent model. One with a memory is read token by token.
        data: ``valid`` (also train, calib, probe) or a corpus (``text:PATH`` ...).
        tokens: at most so many of each source.
        loops: R of the trajectories; at most those that a model with weights by loop has.
        eps: nats.
        classes: ``text``, ``code``, or ``auto``: each source by its looks.
        out: the folder; ``lab`` in the run's where None.
        batch_size: rows at a time; None: 8, or 64 where they are read token by token.
        seed: of the samples.

    Raises:
        UsageError: a dense model, a depth that it does not have, or a text that is too short or cannot be read.
        RunError: a model that does not stand so many loops.
    """
    model, config = run.model, run.recipe.model
    check_trace(model, loops)
    check_scheme(classes)
    if not eps > 0:
        raise UsageError(f"eps={eps}: a number above 0, such as {EPS:g}: KL is never below 0")
    if loops < 2:
        raise UsageError(f"loops={loops}: a token converges from one loop to the next; give 2 or more")
    if tokens < LEAST_TOKENS:
        raise UsageError(f"tokens={tokens}: too few for a distribution; give {LEAST_TOKENS} or more")
    text = Text.open(run, data, tokens)
    out = out or run.run.writable().lab
    with disk(out):
        out.mkdir(parents=True, exist_ok=True)
    notes = []
    if config.memory.carries:
        notes.append("rows were read token by token, each with the memory of those before it at the last loop")
        progress.say(
            f"this model has a memory: a row is read in {config.seq_len} passes, one a token, and once more at each "
            "depth of the elasticity curve. Where that takes too long, lower --tokens"
        )
    sample = _sample(text, _PATH_ROWS, min(config.seq_len, max(1, _PATH_CELLS // config.vocab_size // _PATH_ROWS)))
    with progress.bar("following two initial states", None):
        paths = path_independence(model, sample.to(model.embed.weight.device), loops, seed)
    at = sorted({1, min(config.n_loops, loops - 1), loops - 1})
    blocks = _sample(text, _BLOCK_ROWS, min(config.seq_len, _BLOCK_TOKENS)).to(model.embed.weight.device)
    found: tuple[Contraction, ...] = ()
    with progress.bar("taking the loop's Jacobian", None):
        try:
            found = contraction(model, blocks, at, loops, seed)
        except RuntimeError as error:  # a part of the model has no forward derivative
            notes.append(f"the loop's Jacobian could not be taken: {str(error).splitlines()[0][:200]}")
    gates = diagnose(model, next(iter(text.streams.values())), run.train_step, run.dtype, loops)
    tally, by_loop = Tally(loops, config.seq_len), ByLoop(loops)
    sweep = Sweep(loops, tuple(sorted({*EPS_SWEEP, eps}, reverse=True)))
    schemes: dict[str, Scheme] = {}
    passages: list[dict[str, Any]] = []
    n_bytes = 0
    n_rows = rows_at_a_time(batch_size, is_exact=config.memory.carries)
    with parquet_file(out / "tokens.parquet") as write:
        with progress.bar(f"tracing {text.name} to {loops} loops", text.n_tokens) as advance:
            for name, stream in text.streams.items():
                source = _Source(run, name, stream, text, classes, eps)
                schemes[name] = source.scheme
                for part in trajectories(run, stream, text.n_tokens_of(stream), loops, n_rows, advance):
                    check_finite(part.read, run.train_step, loops)
                    n_bytes += source.add(part, tally, by_loop, sweep, write)
                tally.close(len(source.ends_U))
                passages.append({"source": name, "tokens": source.passage})
        if tally.n_tokens < LEAST_TOKENS:
            raise UsageError(
                f"{data}: {tally.n_tokens} of its tokens stand for text and have one before them; the lab needs "
                f"{LEAST_TOKENS} or more. Give a longer text"
            )
        # In the block: until all is measured, the files of an earlier lab stay.
        elasticity, said = _elasticity(run, data, tokens, batch_size)
    notes += [*said, *text.notes(run, tally.units_held(), n_bytes)]
    result = LabResult(
        data=data,
        train_step=run.train_step,
        loops=loops,
        eps=eps,
        dtype=str(run.dtype).removeprefix("torch."),
        classes=schemes,
        unit=text.unit,
        n_units=tally.units_held(),
        n_tokens=tally.n_tokens,
        n_bytes=n_bytes,
        notes=tuple(notes),
        depth=tally.group("all tokens"),
        histogram=tally.histogram(),
        by_eps=sweep.to_json(),
        by_loop=by_loop.to_json(),
        by_class=tally.groups(tally["kind"], _class_names(schemes)),
        by_position=tally.by_position(),
        by_difficulty=tally.by_difficulty(),
        by_hops=tally.by_hops(),
        hops_accuracy={
            hops: (right_R / max(1, int((tally["hops"] == hops).sum()))).tolist()
            for hops, right_R in sorted(tally.correct.items())
        },
        elasticity=elasticity,
        paths=paths,
        contraction=found,
        gates=gates,
        passages=passages,
    )
    write_json(out / "lab.json", result.to_json())
    return result


class _Source:
    """One source of the text: its classes, units and beginning."""

    def __init__(self, run: LoadedRun, name: str, stream: Stream, text: Text, classes: str, eps: float) -> None:
        self.name, self.eps, self.seq_len = name, eps, run.model.config.seq_len
        self.bytes_V, self.tokenizer = run.tokenizer.token_bytes_V, run.tokenizer
        self.ends_U = text.unit_ends(stream)
        self.passage: list[dict[str, Any]] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        n_tokens = text.n_tokens_of(stream)
        head = run.tokenizer.decode_bytes(stream.read(0, min(n_tokens, 1 << 14))).decode("utf-8", "replace")
        self.scheme: Scheme = pick_scheme(head) if classes == "auto" else "code" if classes == "code" else "text"
        self.kind_T, self.hops_T = np.zeros(n_tokens, np.uint8), np.zeros(n_tokens, np.uint8)
        for i in range(stream.n_documents):
            start, stop = stream.range_of(i)
            if start >= n_tokens:
                break
            stop = min(stop, n_tokens)
            pieces = [self._piece(token) for token in stream.read(start, stop).tolist()]
            self.kind_T[start:stop] = classify(pieces, self.scheme)
            self.hops_T[start:stop] = hops_of(pieces)

    def _piece(self, token: int) -> bytes:
        return self.tokenizer.decode_bytes([token]) if self.bytes_V[token] else b""

    def add(self, part: Part, tally: Tally, by_loop: ByLoop, sweep: Sweep, write: Columns) -> int:
        """Count a part of the text; its bytes."""
        place_N = np.arange(part.start, part.start + len(part.ids_N))
        bytes_N = self.bytes_V[part.ids_N]
        text_N = bytes_N > 0
        depths = depths_of(part.read, self.eps)
        read = {name: x.numpy() for name, x in part.read.items()}
        self._tell(part, depths.settled, depths.censored, read["loss"][:, -1])
        place_N, ids_N = place_N[text_N], part.ids_N[text_N]
        read = {name: x_NR[text_N] for name, x_NR in read.items()}
        settled_N, censored_N, crossing_N, stable_N = (x[text_N] for x in depths)
        kind_N, hops_N = self.kind_T[place_N], self.hops_T[place_N]
        pos_N = ((place_N - 1) % self.seq_len).astype(np.int32)
        unit_N = np.searchsorted(self.ends_U, place_N, side="right").astype(np.int32)
        by_loop.add(read, ids_N)
        sweep.add(part.read["kl_previous"][torch.from_numpy(text_N)])
        tally.add(
            read["argmax"] == ids_N[:, None],
            unit=unit_N,
            settled=settled_N,
            censored=censored_N,
            crossing=crossing_N,
            stable=stable_N,
            kind=kind_N + np.uint8(_offset(self.scheme)),
            pos=pos_N,
            hops=hops_N,
            loss=read["loss"][:, -1].astype(np.float32),
        )
        write(
            {
                "source": [self.name] * len(ids_N),
                "place": place_N,
                "unit": unit_N,
                "position": pos_N,
                "token": ids_N.astype(np.int32),
                "class": [CLASSES[self.scheme][kind] for kind in kind_N],
                "hops": hops_N,
                "depth": settled_N,
                "censored": censored_N,
                "first_crossing": crossing_N,
                "stable_loop": stable_N,
                **{name: read[name].astype(np.int32 if name == "argmax" else np.float32) for name in NUMBERS},
            }
        )
        return int(bytes_N.sum())

    def _tell(self, part: Part, settled_N: np.ndarray, censored_N: np.ndarray, loss_N: np.ndarray) -> None:
        """Keep the beginning as text: a token that ends inside a character gives it to the one that ends it."""
        for i, token in enumerate(part.ids_N[: max(0, _PASSAGE_TOKENS - len(self.passage))].tolist()):
            piece = self._piece(token)
            if not piece:
                self.passage.append({"text": "\n"})  # a document ends
                continue
            self.passage.append(
                {
                    "text": self._decoder.decode(piece),
                    "depth": int(settled_N[i]),
                    "censored": bool(censored_N[i]),
                    "class": CLASSES[self.scheme][self.kind_T[part.start + i]],
                    "loss": round(float(loss_N[i]), 4),
                }
            )


def hops_of(pieces: list[bytes]) -> np.ndarray:
    """Of each token of a document how many hops the answer takes that it ends; 0 where it ends none."""
    hops_N = np.zeros(len(pieces), np.uint8)
    raw = b"".join(pieces)
    if b"hops:" not in raw:
        return hops_N
    ends_N = np.cumsum([len(piece) for piece in pieces])
    for _, stop, hops in answers(raw):
        hops_N[int(np.searchsorted(ends_N, stop))] = hops
    return hops_N


def _sample(text: Text, n_rows: int, n_tokens: int) -> torch.Tensor:
    """Rows spread over the longest source, [B, T]: fewer where it is short."""
    stream = max(text.streams.values(), key=text.n_tokens_of)
    held = text.n_tokens_of(stream)
    n_tokens = min(n_tokens, held)
    starts = np.unique(np.linspace(0, held - n_tokens, min(n_rows, max(1, held // n_tokens))).astype(int))
    return torch.from_numpy(np.stack([stream.read(s, s + n_tokens).astype(np.int64) for s in starts.tolist()]))


def _elasticity(run: LoadedRun, data: str, tokens: int, batch_size: int | None) -> tuple[EvalResult | None, list[str]]:
    most = run.recipe.model.max_loops
    depths = [n for n in ELASTICITY if most is None or n <= most]
    try:
        return evaluate(run, depths, data, max_tokens=min(tokens, _ELASTICITY_TOKENS), batch_size=batch_size), []
    except RunError as error:
        return None, [f"no elasticity curve: {error}"]


def _offset(scheme: Scheme) -> int:
    """Where the classes of a scheme begin among those of all."""
    return 0 if scheme == "text" else len(CLASSES["text"])


def _class_names(schemes: Mapping[str, Scheme]) -> list[str]:
    """Of the classes of all schemes; with the scheme where a text has several."""
    several = len(set(schemes.values())) > 1
    return [f"{scheme}: {name}" if several else name for scheme, names in CLASSES.items() for name in names]

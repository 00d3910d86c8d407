"""Run every law that applies on one model."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alcoda.errors import UsageError, did_you_mean
from alcoda.laws.law import Law, LawBroken, LawResult
from alcoda.laws.registry import LAWS
from alcoda.laws.shrink import shrink
from alcoda.laws.subject import MOST_TOKENS, VOCAB, Subject
from alcoda.model.config import ModelConfig
from alcoda.progress import bar
from alcoda.training.recipe import Recipe


@dataclass(frozen=True)
class LawReport:
    """What came of the laws on one model.

    Attributes:
        config: of the model that was checked.
        changes: what was changed of the model that was given, to make it small.
        seed: of the weights.
        results: one a law, in the order of docs/design.
    """

    config: ModelConfig
    changes: tuple[str, ...]
    seed: int
    results: tuple[LawResult, ...]

    @property
    def broken(self) -> tuple[LawResult, ...]:
        """The laws that the model breaks."""
        return tuple(result for result in self.results if result.status == "broken")

    @property
    def hold(self) -> bool:
        """Whether it breaks none."""
        return not self.broken

    def notes(self) -> list[str]:
        """What a table has no room for: what was changed, laws that do not apply, and where others are broken."""
        lines = [f"checked small: {', '.join(self.changes)}"] if self.changes else []
        lines += [f"n.a. {r.law}: {r.message}" for r in self.results if r.status == "not applicable"]
        for r in self.broken:
            lines.append(f"BROKEN {r.law}: {r.message}")
            if r.positions:
                places = ", ".join(p if isinstance(p, str) else f"(row {p[0]}, token {p[1]})" for p in r.positions)
                more = r.n_positions - len(r.positions)
                lines.append(f"    at {places}" + (f", and {more} more" if more else ""))
        return lines

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "hold": self.hold,
            "broken": [result.law for result in self.broken],
            "seed": self.seed,
            "changes": list(self.changes),
            "model": self.config.model_dump(mode="json"),
            "laws": [result.to_json() for result in self.results],
        }


def pick(names: Sequence[str]) -> tuple[Law, ...]:
    """The laws of these names; all where there are none."""
    known = {law.name: law for law in LAWS}
    for name in names:
        if name not in known:
            raise UsageError(f"unknown law {name!r}{did_you_mean(name, known)}")
    return tuple(law for law in LAWS if not names or law.name in names)


def check_laws(
    config: Recipe | ModelConfig,
    laws: Sequence[str] = (),
    *,
    seed: int = 0,
    full_size: bool = False,
    compiled: bool = False,
) -> LawReport:
    """Whether a model keeps the laws of docs/design, section 7: no future leak, decoding equal to the full pass, ...

    Args:
        config: a recipe or its model. It is made small first: every choice is kept, the sizes are not.
        laws: names of those that are wanted; all where empty.
        seed: of the weights.
        full_size: check the model as it is.
        compiled: check compiled passes too (a minute, and a C++ compiler).

    Raises:
        UsageError: an unknown law, or a model that cannot be made small.
    """
    recipe = config if isinstance(config, Recipe) else None
    model = recipe.model if recipe is not None else config
    if not isinstance(model, ModelConfig):
        raise UsageError(f"laws are of a Recipe or a ModelConfig, not {config!r}: alcoda.load_recipe(PATH) reads one")
    wanted = pick(laws)
    changes: tuple[str, ...] = ()
    if full_size:
        _check_room(model)
    else:
        model, changes = shrink(model)
    subject = Subject(model, seed, recipe, compiled)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # equality to the bit holds for sums that are taken in one order
    try:
        with torch.random.fork_rng(devices=[]), bar("laws", len(wanted)) as advance:
            subject.model()  # one that cannot be built breaks no law: its own error says more
            results = []
            for law in wanted:
                advance(0, law.name)
                results.append(_check(law, subject))
                advance(1, law.name)
    finally:
        torch.set_num_threads(threads)
    return LawReport(model, changes, seed, tuple(results))


def _check_room(model: ModelConfig) -> None:
    for name, least in (("vocab_size", VOCAB), ("seq_len", MOST_TOKENS)):
        if getattr(model, name) < least:
            raise UsageError(
                f"model.{name}={getattr(model, name)}: the laws run texts of {MOST_TOKENS} tokens of {VOCAB} ids; "
                f"set it to {least} or more, or leave --full-size out"
            )


def _check(law: Law, subject: Subject) -> LawResult:
    began = time.perf_counter()

    def result(status: Any, message: str = "", error: LawBroken | None = None) -> LawResult:
        places, n_places = ((), 0) if error is None else (error.positions, error.n_positions)
        seconds = time.perf_counter() - began
        return LawResult(law.name, law.number, law.statement, status, message, places, n_places, seconds)

    torch.manual_seed(subject.seed)
    reason = law.exception(subject)
    if reason is not None:
        return result("not applicable", reason)
    try:
        law.check(subject)
    except LawBroken as error:
        return result("broken", error.message, error)
    except Exception as error:  # what a pass of a foreign choice may raise is nobody's to say
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name} line {where.lineno}"
        return result("broken", f"the check ended in {type(error).__name__}: {error} ({place})")
    return result("holds")

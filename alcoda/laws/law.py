"""What a law is, how it says that it is broken, and the comparisons that laws are made of."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

if TYPE_CHECKING:
    from alcoda.laws.subject import Subject

Place = tuple[int, int] | str
"""Where a law is broken: (row, token), or the name of a parameter, a part or a term."""

MOST_POSITIONS = 20
"""So many of them are kept: one fault can offend everywhere."""


class LawBroken(AssertionError):
    """A model does otherwise than a law says.

    Attributes:
        message: what was compared, and by how much it is off.
        positions: where, `MOST_POSITIONS` at most.
        n_positions: how many there are in all.
    """

    def __init__(self, message: str, positions: Sequence[Place] = (), n_positions: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.positions = tuple(positions[:MOST_POSITIONS])
        self.n_positions = len(positions) if n_positions is None else n_positions


@dataclass(frozen=True)
class Law:
    """One promise of docs/design, section 7.

    Attributes:
        name: what the command line calls it.
        number: its paragraph in section 7.
        statement: one line, of a model that keeps it.
        check: raises `LawBroken` of a model that does not.
        exception: why the law says nothing about a model; None where it does.
    """

    name: str
    number: int
    statement: str
    check: Callable[[Subject], None]
    exception: Callable[[Subject], str | None] = lambda subject: None


Status = Literal["holds", "broken", "not applicable"]


@dataclass(frozen=True)
class LawResult:
    """What came of one law on one model.

    Attributes:
        law, number, statement: of the `Law`.
        status: whether it holds.
        message: what was off, or why the law does not apply.
        positions: (row, token) places or names, a bounded number of them.
        n_positions: how many there are in all.
        seconds: that the check took.
    """

    law: str
    number: int
    statement: str
    status: Status
    message: str = ""
    positions: tuple[Place, ...] = ()
    n_positions: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class Parts:
    """Collects what is broken over the parts of a law (depths, ways to cut a text), so that all of it is told."""

    def __init__(self) -> None:
        self.broken: list[tuple[str, LawBroken]] = []

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """One part, which may break the law without ending the check."""
        try:
            yield
        except LawBroken as error:
            self.broken.append((name, error))

    def settle(self) -> None:
        """Raise `LawBroken` if a part did."""
        if self.broken:
            places = list(dict.fromkeys(place for _, error in self.broken for place in error.positions))
            total = max(len(places), *(error.n_positions for _, error in self.broken))
            raise LawBroken("; ".join(f"{name}: {error.message}" for name, error in self.broken), places, total)


def each(parts: Iterable[tuple[str, Callable[[], None]]]) -> None:
    """Run every part of a law; `LawBroken` of all that broke it."""
    collected = Parts()
    for name, check in parts:
        with collected.part(name):
            check()
    collected.settle()


def require(holds: bool | Tensor, message: str, positions: Sequence[Place] = ()) -> None:
    """`LawBroken` unless ``holds``."""
    if not bool(holds):
        raise LawBroken(message, positions)


def close(actual: Tensor, expected: Tensor, atol: float, what: str, positions: Sequence[Place] = ()) -> None:
    """`LawBroken`, naming the law, where two tensors differ by more than ``atol`` or one is not a number."""
    require(actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    off = (actual - expected).abs().max().item() if actual.numel() else 0.0
    require(off <= atol, f"{what}: off by {off:.3g}, allowed {atol:.3g}", positions)


def close_logits(
    actual: Tensor, expected: Tensor, atol: float, what: str, row: int = 0, tokens: Sequence[int] | None = None
) -> None:
    """`close` of logits ``[B, T, V]`` or ``[T, V]``, with the (row, token) of each that is off.

    Args:
        row: which row of the batch the first is.
        tokens: which tokens of their rows these are, where they are not 0 .. T-1.
    """
    places: list[Place] = []
    if actual.shape == expected.shape:
        off_BT = ~((actual - expected).abs() <= atol).all(-1)  # a NaN is off
        off_BT = off_BT if off_BT.dim() == 2 else off_BT[None]
        found = off_BT.nonzero().tolist()
        places = [(row + i, tokens[j] if tokens is not None else j) for i, j in found]
    close(actual, expected, atol, what, places)

"""What is asked of the engine, and what comes of it. No tensors but those of a finished trajectory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from alcoda.depth.watch import ExitTest
from alcoda.engine.cache import Span
from alcoda.engine.sampling import GREEDY, Row, Sampling
from alcoda.model.cache_policy import CachePolicy
from alcoda.model.prefill import Prefill

Finish = Literal["stop", "length", "cancelled", "error"]
"""``stop``: the end of the text, or a stop string; ``length``: max_tokens."""


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and how it goes on.

    Attributes:
        prompt: token ids.
        max_tokens: how many follow at most.
        sampling: how they are drawn.
        loops: of each token, with a rule at most; None: the rule's, or the model's own.
        test: when tokens leave the loop; None: none leaves early.
        n: completions, each with noise of its own.
        stop_ids: tokens that end it, not part of it.
        halt: is told of each token, and says whether the completion ends with it (a stop string).
        prefill: how a model with a memory reads the prompt, where no rule is given; None: exactly.
        trace: whether to keep what each token goes through from loop to loop; then none is drafted.
        row: which row of a recorded trace the prompt is, for a test that replays one.
        cache: what a token leaves in the cache, which the engine is to keep so; None: as it does.
        name: for its owner.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    sampling: Sampling = GREEDY
    loops: int | None = None
    test: ExitTest | None = None
    n: int = 1
    stop_ids: frozenset[int] = frozenset()
    halt: Callable[[Completion, int], bool] | None = None
    prefill: Prefill | None = None
    trace: bool = False
    row: int = 0
    cache: CachePolicy | None = None
    name: Any = None


@dataclass(eq=False)
class Step:
    """What one loop did to a token, of a request that is traced.

    Attributes:
        state_change: ``|h_i - h_i-1| / |h_i|``.
        kl: from the distribution after the loop before, in nats; None after the first.
        top: the likeliest tokens and their log-probabilities.
    """

    state_change: float
    kl: float | None
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Token:
    """A token that was drawn.

    Attributes:
        token: its id.
        loops: that the token before it ran, of whose state it was drawn; of the first one, the last of the prompt.
        logprob, top: as `alcoda.engine.sampling.Drawn`.
        steps: by loop, of a request that is traced.
    """

    token: int
    loops: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    steps: tuple[Step, ...] = ()


@dataclass(eq=False)
class Completion:
    """One completion of a request: what it has become, and what it holds.

    Attributes:
        request: that it is of.
        stream: which of its n.
        n_loops: of a token, at most.
        tokens: drawn so far; the one that ended it is not among them where it is a ``stop_ids``.
        last: the one of ``stop_ids`` that ended it, if one did.
        finish: why it ended; None: it has not.
        error: what was wrong, where it failed.
        prompt_loops: of each token of the prompt.
        began_s: when it was given a place (`time.monotonic`); None: it waits.
    """

    request: Request
    stream: int
    n_loops: int
    tokens: list[Token] = field(default_factory=list)
    last: Token | None = None
    finish: Finish | None = None
    error: str | None = None
    prompt_loops: list[int] = field(default_factory=list)
    began_s: float | None = None
    # While it runs:
    span: Span | None = None
    coda_per_loop: bool = False
    n_read: int = 0
    reader: Any = None
    head: Item | None = None
    carried_LD: torch.Tensor | None = None
    passed_over: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        """That it may come to hold in the cache: of the last token that is drawn no keys are kept."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    def row(self, drafts: tuple[int, ...] = ()) -> Row:
        """What the next token is drawn by, after tokens that are only drafts."""
        output = [*self.ids, *drafts] if drafts else self.ids
        return Row(self.request.sampling, self.request.prompt, output, self.stream)


@dataclass(eq=False)
class Item:
    """A token in the loop, or on its way in or out.

    Attributes:
        completion: whose it is.
        position: in its text.
        token: its id.
        row: of the runner's banks.
        loops: that it has run.
        depth: those after which it leaves, where that is known before it has run them.
        left: whether it is out.
        parent: the token before it, of which it is only a draft; None: it is certain.
        child: the token after it, drawn from what it was after a few loops; not certain.
        drafted: after how many, newest.
        readout: logits of its state when it left, and what is remembered of it, where the rule had to look at them.
        steps: so far, of a request that is traced.
        log_p: after the newest of them.
        dropped: whether it is scheduled no more.
        barren: whether no draft can follow it: the one drawn would end the text.
    """

    completion: Completion
    position: int
    token: int
    row: int = -1
    loops: int = 0
    depth: int | None = None
    left: bool = False
    parent: Item | None = None
    child: Item | None = None
    drafted: int = 0
    readout: tuple[torch.Tensor, torch.Tensor | None] | None = None
    steps: list[Step] = field(default_factory=list)
    log_p: Any = None
    dropped: bool = False
    barren: bool = False

    @property
    def youngest(self) -> Item:
        """The last of the drafts after it; itself where there are none."""
        item = self
        while item.child is not None:
            item = item.child
        return item

    def line(self) -> list[Item]:
        """The newest certain token, and the drafts after it up to this one."""
        found: list[Item] = []
        item: Item | None = self
        while item is not None:
            found.append(item)
            item = item.parent
        return found[::-1]

    def drafts(self) -> tuple[int, ...]:
        """Tokens of the text up to this one that are not certain."""
        return tuple(item.token for item in self.line()[1:])

    def family(self) -> list[Item]:
        """The item and what was drafted after it."""
        found: list[Item] = []
        item: Item | None = self
        while item is not None:
            found.append(item)
            item = item.child
        return found


def filler() -> Item:
    """A token of nobody's, for rows that only fill a launch."""
    return Item(Completion(Request((0,)), 0, 1), position=0, token=0, row=0)

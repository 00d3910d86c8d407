"""What runs next. Pure Python: it knows tokens as items, and nothing of tensors.

Every launch is one of three (docs/design, section 8): the coda of tokens that have left the loop, a piece of a prompt
or several whole ones, or a loop of tokens at any depths. Tokens that stay in the loop keep their place at the front,
those that follow one that left fill the room it made, and where room is to spare, drafts do (the wavefront).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import NamedTuple

from alcoda.engine.cache import Span
from alcoda.engine.request import Completion, Item

BYPASS = 16
"""How many requests may begin before one that waits for room and came first."""
UNDISTURBED = 4
"""How many pieces' tokens are read in one pass while nothing else runs: many rows share the reading of the weights."""
EVEN = 0.75
"""Prompts that are read together are padded to the longest of them: the shortest is at least this much of it."""


class Coda(NamedTuple):
    """Read tokens out, draw what follows them, and begin that.

    Attributes:
        leaving: tokens that are out, and certain.
        drafting: tokens still in the loop, of which a draft of the next is wanted, or the one there is looked at again.
    """

    leaving: list[Item]
    drafting: list[Item]


class Part(NamedTuple):
    """Tokens ``start`` to ``stop`` - 1 of a prompt."""

    completion: Completion
    start: int
    stop: int


class Piece(NamedTuple):
    """Read a part of one prompt, or several prompts whole, in one pass."""

    parts: list[Part]


class Core(NamedTuple):
    """Run a loop of these tokens."""

    items: list[Item]


Launch = Coda | Piece | Core


class Scheduler:
    """Which launch is next.

    Args:
        width: tokens of a launch, at most.
        min_coda: tokens that have left wait until they are so many, or until nothing else can run; asked each time.
        piece: length of the next piece of a prompt of which so many tokens are read.
        draft_loops: after how many loops the next token is drafted; None: never.
        refill: whether tokens that begin join those in the loop; else they wait until all of those are out.
        kind: prompts of one kind can be read in one pass; None: of one that is read alone.
    """

    def __init__(
        self,
        width: int,
        min_coda: Callable[[], int],
        piece: Callable[[Completion], int],
        draft_loops: int | None = None,
        refill: bool = True,
        kind: Callable[[Completion], Hashable] = lambda completion: None,
    ) -> None:
        self.width, self.min_coda, self.piece, self.kind = width, min_coda, piece, kind
        self.draft_loops, self.refill = draft_loops, refill
        self.waiting: deque[Completion] = deque()
        self.reading: deque[Completion] = deque()
        self.ready: deque[Item] = deque()
        """In the loop, and certain."""
        self.drafts: list[Item] = []
        """In the loop or out of it, and not certain; a parent stands before its child."""
        self.leaving: list[Item] = []
        """Out of the loop, and certain."""
        self._may_read = True

    # -- in and out ---------------------------------------------------------------------------------------------------

    @property
    def n_running(self) -> int:
        """Completions that have a place."""
        return len(self.reading) + len(self.ready) + len(self.leaving)

    def add(self, completion: Completion) -> None:
        """Behind all that wait."""
        self.waiting.append(completion)

    def admit(self, reserve: Callable[[Completion], Span | None], n_places: int) -> list[Completion]:
        """Give a place to those that fit, in order; a few may pass one that does not fit yet.

        Args:
            reserve: finds room for a completion's whole life, or None.
            n_places: how many may begin.
        """
        begun: list[Completion] = []
        skipped: list[Completion] = []
        while self.waiting and len(begun) < n_places:
            completion = self.waiting.popleft()
            span = reserve(completion)
            if span is None:
                skipped.append(completion)
                if skipped[0].passed_over >= BYPASS:
                    break
                continue
            completion.span = span
            begun.append(completion)
            for one in skipped:
                one.passed_over += 1
        self.waiting.extendleft(reversed(skipped))
        self.reading.extend(begun)
        return begun

    def remove(self, completion: Completion) -> list[Item]:
        """All of a completion's items, which are scheduled no more."""
        gone = [] if completion.head is None else completion.head.family()
        for item in gone:
            self.drop(item)
        for queue in (self.waiting, self.reading):
            if completion in queue:
                queue.remove(completion)
        return gone

    def drop(self, item: Item) -> None:
        """Schedule an item no more."""
        item.dropped = True
        for queue in (self.ready, self.drafts, self.leaving):
            if item in queue:
                queue.remove(item)

    # -- what is next -------------------------------------------------------------------------------------------------

    def next(self) -> Launch | None:
        """The next launch; None where nothing can run."""
        drafting = self._drafting()
        # Without refill a wave that has begun takes nobody in.
        joins = not self.ready if self.refill else all(item.loops == 0 for item in self.ready)
        can_read = bool(self.reading) and (joins or (self.refill and self._may_read))
        if self.leaving or drafting:
            # One whose draft is in the loop waits for company: to know that it is right hurries nothing.
            n_stopped = sum(item.youngest.left for item in self.leaving)
            nothing_runs = joins and not can_read and not self._spare(1)
            if nothing_runs or n_stopped + len(drafting) >= self.min_coda():
                leaving, self.leaving = self.leaving[: self.width], self.leaving[self.width :]
                room = self.width - len(leaving)
                return Coda(leaving, [*drafting, *self._doubtful()][:room])
        if can_read:
            self._may_read = False
            return Piece(self._parts())
        items = [self.ready.popleft() for _ in range(min(self.width, len(self.ready)))]
        items += self._spare(self.width - len(items))
        self._may_read = True
        return Core(items) if items else None

    def _parts(self) -> list[Part]:
        """The next part of the prompt that came first; where that is all of it, those right behind it that can be read
        in the same pass: of its kind, about as long, and with their padding no more tokens than a piece of one prompt
        has; or `UNDISTURBED` times as many where no token is in the loop that would wait."""
        first = self.reading[0]
        start, n_most = first.n_read, self.piece(first)
        parts = [Part(first, start, min(start + n_most, len(first.request.prompt)))]
        kind = self.kind(first)
        if kind is None or parts[0].stop - start < len(first.request.prompt):
            return parts
        n_most *= 1 if self.ready or self.drafts or self.leaving else UNDISTURBED
        shortest = longest = parts[0].stop
        for one in islice(self.reading, 1, self.width):
            length = len(one.request.prompt)
            shortest, longest = min(shortest, length), max(longest, length)
            if (len(parts) + 1) * longest > n_most or shortest < EVEN * longest or self.kind(one) != kind:
                break  # nobody is passed over
            parts.append(Part(one, 0, length))
        return parts

    def _spare(self, n: int) -> list[Item]:
        """Drafts that may run a loop: each behind what it follows, whose keys it reads."""
        found = [
            item
            for item in self.drafts
            if not item.left and item.parent is not None and (item.parent.left or item.parent.loops > item.loops)
        ]
        return found[: max(n, 0)]

    def _drafting(self) -> list[Item]:
        """Tokens of which a draft of the next is wanted: room in the launch is to spare."""
        if self.draft_loops is None:
            return []
        spare = self.width - len(self.ready) - len(self.drafts) - len(self.leaving)
        if spare <= 0:
            return []
        youngest = [item for item in (*self.ready, *self.drafts) if item.child is None]
        return [item for item in youngest if self._drafts_after(item)][:spare]

    def _doubtful(self) -> list[Item]:
        """Tokens whose draft, or the want of one, was drawn some loops ago: a draft that turns out wrong early costs
        less. The launch is made anyway."""
        if self.draft_loops is None:
            return []
        drafted = (item for item in (*self.ready, *self.drafts) if item.child is not None or item.barren)
        return [item for item in drafted if not item.left and item.loops > item.drafted]

    def _drafts_after(self, item: Item) -> bool:
        assert self.draft_loops is not None
        completion = item.completion
        # What a trajectory tells of a loop is read with the coda's keys of tokens that have left: a draft's is not yet.
        if completion.request.trace:
            return False
        room = len(completion.request.prompt) + completion.request.max_tokens - 1
        # A draft of what would never be kept, or right before the token itself is certain, is of no use.
        return item.loops >= self.draft_loops and not (item.left or item.barren) and item.position + 1 < room

    # -- what came of it ----------------------------------------------------------------------------------------------

    def ran(self, items: Sequence[Item], leaves: Sequence[bool]) -> None:
        """A loop of ``items`` was run, after which some leave."""
        stay: list[Item] = []
        for item, leaves_here in zip(items, leaves, strict=True):
            item.loops += 1
            item.left = leaves_here
            if item.parent is not None:
                continue  # it stays among the drafts
            if leaves_here:
                self.leaving.append(item)
            else:
                stay.append(item)
        self.ready.extendleft(reversed(stay))

    def begin(self, item: Item) -> None:
        """A token begins the loop."""
        if item.parent is None:
            self.ready.append(item)
        else:
            self.drafts.append(item)

    def confirm(self, item: Item) -> None:
        """A draft has turned out right: it is certain now."""
        self.drafts.remove(item)
        item.parent = None
        if item.left:
            self.leaving.append(item)
        else:
            self.ready.append(item)

    def read(self, completion: Completion, n_tokens: int) -> bool:
        """So many more tokens of a prompt were read; whether that was the last of it."""
        completion.n_read += n_tokens
        if completion.n_read < len(completion.request.prompt):
            return False
        self.reading.remove(completion)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.reading or self.ready or self.drafts or self.leaving)

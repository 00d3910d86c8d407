"""The scheduler alone, without tensors: who runs next, and that nobody waits for ever."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from alcoda.engine.cache import Span
from alcoda.engine.request import Completion, Item, Request
from alcoda.engine.scheduler import BYPASS, UNDISTURBED, Coda, Core, Launch, Piece, Scheduler


def completion(n_prompt: int = 1, max_tokens: int = 4, name: Any = None) -> Completion:
    return Completion(Request((0,) * n_prompt, max_tokens, name=name), 0, 4)


def scheduler(width: int = 4, min_coda: int = 1, piece: int = 4, **more: Any) -> Scheduler:
    return Scheduler(width, lambda: min_coda, lambda one: piece, **more)


def begin(s: Scheduler, *names: Any, loops: int = 0) -> list[Item]:
    """Items in the loop, of completions of their own."""
    items = []
    for name in names:
        one = completion(name=name)
        one.head = Item(one, 1, 0, loops=loops)
        s.begin(one.head)
        items.append(one.head)
    return items


def names(launch: Launch | None) -> list[Any]:
    match launch:
        case Core(items):
            return [item.completion.request.name for item in items]
        case Coda(leaving, drafting):
            return [item.completion.request.name for item in (*leaving, *drafting)]
        case Piece(parts):
            return [part.completion.request.name for part in parts]
    return []


# -- the loop ---------------------------------------------------------------------------------------------------------


def test_those_who_stay_go_first() -> None:
    s = scheduler(width=2, min_coda=9)
    begin(s, "a", "b", "c")
    first = s.next()
    assert isinstance(first, Core) and names(first) == ["a", "b"]
    s.ran(first.items, [True, False])
    second = s.next()
    assert isinstance(second, Core) and names(second) == ["b", "c"], "b keeps its place, and c takes that of a"
    s.ran(second.items, [False, False])
    assert names(s.next()) == ["b", "c"]


def test_a_launch_is_never_wider_than_it_may_be() -> None:
    s = scheduler(width=3, min_coda=1)
    items = begin(s, *range(8))
    launch = s.next()
    assert isinstance(launch, Core) and len(launch.items) == 3
    s.ran(launch.items, [True] * 3)
    for _ in range(2):
        s.ready.clear()
    s.leaving += items[3:]
    coda = s.next()
    assert isinstance(coda, Coda) and len(coda.leaving) == 3 and len(s.leaving) == 5


def test_one_piece_of_a_prompt_between_two_loops() -> None:
    s = scheduler(width=4, piece=2)
    begin(s, "in")
    one = completion(n_prompt=9, name="prompt")
    s.add(one)
    s.admit(lambda c: Span(0, c.n_tokens), 9)
    kinds = []
    for _ in range(6):
        launch = s.next()
        kinds.append(type(launch).__name__)
        if isinstance(launch, Piece):
            assert launch.parts == [(one, one.n_read, min(one.n_read + 2, 9))]
            s.read(one, launch.parts[0].stop - launch.parts[0].start)
        elif isinstance(launch, Core):
            s.ran(launch.items, [False] * len(launch.items))
    assert kinds == ["Piece", "Core"] * 3


def test_prompts_follow_each_other_where_nobody_waits() -> None:
    s = scheduler(piece=2)
    for name in "ab":
        s.add(completion(n_prompt=4, name=name))
    s.admit(lambda c: Span(0, c.n_tokens), 9)
    assert pieces(s) == [[("a", 0, 2)], [("a", 2, 4)], [("b", 0, 2)], [("b", 2, 4)]] and s.next() is None


def pieces(s: Scheduler) -> list[list[tuple[Any, int, int]]]:
    """Which parts of which prompts are read in each launch, while nothing else runs."""
    found = []
    while isinstance(launch := s.next(), Piece):
        found.append([(one.request.name, start, stop) for one, start, stop in launch.parts])
        for one, start, stop in launch.parts:
            s.read(one, stop - start)
    return found


def reading(*lengths: int, kinds: str = "k" * 14, piece: int = 12, **more: Any) -> Scheduler:
    """Prompts of these lengths and kinds (``-``: none); their names are their places."""

    def kind(one: Completion) -> str | None:
        found = kinds[one.request.name]
        return None if found == "-" else found

    s = scheduler(piece=piece, kind=kind, **more)
    for name, n_prompt in enumerate(lengths):
        s.add(completion(n_prompt=n_prompt, name=name))
    s.admit(lambda c: Span(0, c.n_tokens), 99)
    return s


@pytest.mark.parametrize(
    ("lengths", "how", "together"),
    [
        ((4, 4, 4, 4), {}, [[0, 1, 2], [3]]),  # 12 tokens
        ((4, 4, 3, 4), {}, [[0, 1, 2], [3]]),  # what pads them counts
        ((4, 3, 4, 5), {"piece": 99}, [[0, 1, 2], [3]]),  # 3 is less than 0.75 of 5
        ((3, 4, 5), {"piece": 99}, [[0, 1], [2]]),
        ((8, 2, 8), {"piece": 99}, [[0], [1], [2]]),  # nobody is passed over
        ((4, 4, 4, 4), {"kinds": "kjjk"}, [[0], [1, 2], [3]]),
        ((4, 4, 4, 4), {"kinds": "kk--"}, [[0, 1], [2], [3]]),
        ((1, 1, 1, 1, 1), {"width": 2}, [[0, 1], [2, 3], [4]]),  # no more rows than a launch may have
        ((12, 12), {}, [[0], [1]]),
        ((30, 6, 6), {}, [[0], [0], [0], [1, 2]]),  # the end of a long one is read alone
    ],
    ids=str,
)
def test_prompts_that_are_read_together(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...], how: dict[str, Any], together: list[Any]
) -> None:
    monkeypatch.setattr("alcoda.engine.scheduler.UNDISTURBED", 1)
    found = pieces(reading(*lengths, **how))
    assert [[name for name, _, _ in parts] for parts in found] == together
    read = dict.fromkeys(range(len(lengths)), 0)
    for parts in found:
        for name, start, stop in parts:
            assert start == read[name]
            read[name] = stop
    assert tuple(read.values()) == lengths, "each of its tokens, and once"


def test_more_are_read_while_nobody_waits() -> None:
    alone = reading(*[4] * 14, width=32)
    assert [len(parts) for parts in pieces(alone)] == [12, 2], f"{UNDISTURBED} times 12 tokens"
    disturbed = reading(*[4] * 14, width=32)
    begin(disturbed, "in")
    assert [len(parts) for parts in pieces(disturbed)] == [3]


def test_one_launch_of_prompts_between_two_loops() -> None:
    s = reading(4, 4, 4, 4, 4)
    begin(s, "in")
    kinds = []
    for _ in range(4):
        launch = s.next()
        kinds.append(type(launch).__name__)
        if isinstance(launch, Piece):
            for one, start, stop in launch.parts:
                s.read(one, stop - start)
        elif isinstance(launch, Core):
            s.ran(launch.items, [False] * len(launch.items))
    assert kinds == ["Piece", "Core", "Piece", "Core"] and not s.reading


# -- out of the loop --------------------------------------------------------------------------------------------------


def test_those_who_have_left_wait_for_company_but_not_for_ever() -> None:
    s = scheduler(width=4, min_coda=3)
    begin(s, "a", "b")
    launch = s.next()
    assert isinstance(launch, Core)
    s.ran(launch.items, [True, False])
    assert names(s.next()) == ["b"], "one is too few, and b can run"
    s.ran([launch.items[1]], [True])
    coda = s.next()
    assert isinstance(coda, Coda) and names(coda) == ["a", "b"], "two are too few, and nothing else can run"


@pytest.mark.parametrize("refill", [True, False])
@pytest.mark.parametrize("min_coda", [1, 3, 99])
@pytest.mark.parametrize("seed", range(5))
def test_everything_ends_whatever_is_waited_for(min_coda: int, seed: int, refill: bool) -> None:
    """Random lives, with no engine: launches go on until nothing is left."""
    rng = random.Random(seed)
    s = scheduler(width=rng.randint(1, 5), min_coda=min_coda, piece=3, refill=refill)
    waiting = [completion(rng.randint(1, 8), rng.randint(1, 5), n) for n in range(12)]
    left = {one.request.name: one.request.max_tokens for one in waiting}
    running = 0
    for _ in range(3000):
        if waiting and rng.random() < 0.3:
            s.add(waiting.pop())
        running += len(s.admit(lambda c: Span(0, c.n_tokens), 4 - running))
        launch = s.next()
        match launch:
            case Piece(parts):
                for one, start, stop in parts:
                    if s.read(one, stop - start):
                        begin_next(s, one)
            case Core(items):
                s.ran(items, [rng.random() < 0.4 for _ in items])
            case Coda(leaving, _):
                for item in leaving:
                    left[item.completion.request.name] -= 1
                    if left[item.completion.request.name]:
                        begin_next(s, item.completion)
                    else:
                        running -= 1
            case None if not waiting and s.is_idle:
                break
            case None:
                assert not s.n_running, "nothing runs, and somebody waits"
    assert s.is_idle and not any(left.values()) and not running


def begin_next(s: Scheduler, one: Completion) -> None:
    one.head = Item(one, one.n_read, 0)
    s.begin(one.head)


def test_control_without_the_flush_it_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(self: Scheduler) -> Launch | None:
        if len(self.leaving) >= self.min_coda():
            return original(self)
        held, self.leaving = self.leaving, []
        launch = original(self)
        self.leaving = held + self.leaving
        return launch

    original: Callable[[Scheduler], Launch | None] = Scheduler.next
    monkeypatch.setattr(Scheduler, "next", impatient)
    with pytest.raises(AssertionError):
        test_everything_ends_whatever_is_waited_for(99, 0, True)


# -- admission --------------------------------------------------------------------------------------------------------


def test_small_ones_may_pass_a_large_one_so_often() -> None:
    s = scheduler()
    room = [10]
    large = completion(n_prompt=20, name="large")
    s.add(large)

    def reserve(one: Completion) -> Span | None:
        return Span(0, one.n_tokens) if one.n_tokens <= room[0] else None

    passed = 0
    for n in range(3 * BYPASS):
        s.add(completion(name=n))
        passed += len(s.admit(reserve, 4))
    assert passed == BYPASS, "then those behind it wait too"
    assert s.waiting[0] is large and len(s.waiting) == 1 + 2 * BYPASS
    assert not s.admit(reserve, 4)
    room[0] = 100
    assert s.admit(reserve, 3)[0] is large
    assert [one.request.name for one in s.waiting][:2] == [BYPASS + 2, BYPASS + 3], "in the order that they came"


def test_no_more_begin_than_have_a_place() -> None:
    s = scheduler()
    for n in range(5):
        s.add(completion(name=n))
    assert [one.request.name for one in s.admit(lambda c: Span(0, 1), 2)] == [0, 1]
    assert not s.admit(lambda c: Span(0, 1), 0) and len(s.waiting) == 3 and s.n_running == 2


# -- drafts -----------------------------------------------------------------------------------------------------------


def drafted(s: Scheduler, parent: Item) -> Item:
    """A draft after an item, as the engine makes it."""
    child = Item(parent.completion, parent.position + 1, 0, parent=parent)
    parent.child = child
    s.begin(child)
    return child


def test_a_draft_never_overtakes_its_parent() -> None:
    s = scheduler(width=9, min_coda=1, draft_loops=1)
    (head,) = begin(s, "a", loops=2)
    child = drafted(s, head)
    for _ in range(4):
        runs = s._spare(9)
        assert runs == ([child] if child.loops < head.loops else [])
        s.ran(runs, [False] * len(runs))
    assert child.loops == head.loops == 2
    head.left = True
    assert s._spare(9) == [child], "all keys of one that has left are there"
    child.left = True
    assert not s._spare(9), "and one that has left runs no more"


def test_drafts_take_spare_width_only() -> None:
    s = scheduler(width=3, draft_loops=1)
    items = begin(s, "a", "b", loops=1)
    coda = s.next()
    assert isinstance(coda, Coda) and coda.leaving == [] and coda.drafting == [items[0]], "one is to spare"
    child = drafted(s, items[0])
    launch = s.next()
    assert isinstance(launch, Core) and launch.items == [*items, child]
    s.ran(launch.items, [False] * 3)
    begin(s, "c")
    launch = s.next()
    assert isinstance(launch, Core) and child not in launch.items, "the width is full: the draft waits"
    s.ran(launch.items, [False] * 3)
    assert not s._drafting()


def test_what_is_not_worth_a_draft_has_none() -> None:
    s = scheduler(width=9, draft_loops=2)
    shallow, barren, last = begin(s, "shallow", "barren", "last", loops=2)
    shallow.loops, barren.barren = 1, True
    last.position = last.completion.n_tokens - 1
    assert not s._drafting()
    (good,) = begin(s, "good", loops=2)
    assert s._drafting() == [good]
    drafted(s, good)
    assert not s._drafting(), "of one token there is one draft"


def test_a_draft_that_was_right_takes_the_place_it_has_earned() -> None:
    s = scheduler(draft_loops=1)
    heads = begin(s, "in", "out", loops=3)
    inside, outside = (drafted(s, head) for head in heads)
    outside.left = True
    s.ready.clear()
    for item in (inside, outside):
        s.confirm(item)
    assert list(s.ready) == [inside] and s.leaving == [outside] and not s.drafts
    assert inside.parent is None and outside.parent is None


def test_what_is_removed_is_gone_with_its_drafts() -> None:
    s = scheduler(draft_loops=1)
    (head, other) = begin(s, "a", "b", loops=3)
    child = drafted(s, head)
    grandchild = drafted(s, child)
    assert s.remove(head.completion) == [head, child, grandchild]
    assert all(item.dropped for item in (head, child, grandchild))
    assert list(s.ready) == [other] and not s.drafts and not s.is_idle
    s.remove(other.completion)
    assert s.is_idle and s.next() is None

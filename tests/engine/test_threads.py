"""Launches are given the number of threads that has been fastest."""

from __future__ import annotations

import pytest
import torch
from engines import small

from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.threads import AGAIN, TRIES, Threads, threads_for


def run(threads: Threads, seconds: dict[int, float], n: int, kind: str = "core") -> list[int]:
    picked = []
    for _ in range(n):
        number = threads.pick(kind)
        threads.took(kind, number, seconds[number])
        picked.append(number)
    return picked


@pytest.mark.parametrize(
    ("most", "numbers"), [(1, [1]), (2, [1, 2]), (4, [1, 4]), (16, [1, 4, 16]), (24, [1, 4, 16, 24])]
)
def test_which_numbers_are_tried(most: int, numbers: list[int]) -> None:
    assert Threads(most).numbers == numbers


@pytest.mark.parametrize("best", [1, 4, 16])
def test_each_is_tried_and_the_fastest_is_kept(best: int) -> None:
    threads = Threads(16)
    picked = run(threads, {number: 1.0 if number == best else 2.0 for number in (1, 4, 16)}, AGAIN)
    first, rest = picked[: 3 * TRIES], picked[3 * TRIES :]
    assert [first.count(number) for number in (1, 4, 16)] == [TRIES] * 3
    assert set(rest) == {best}


def test_kinds_are_known_apart() -> None:
    threads = Threads(4)
    run(threads, {1: 1.0, 4: 2.0}, 20, "core")
    run(threads, {1: 2.0, 4: 1.0}, 20, "piece")
    assert (threads.pick("core"), threads.pick("piece")) == (1, 4)


def test_a_machine_that_has_changed_is_found_out() -> None:
    threads = Threads(2)
    assert run(threads, {1: 1.0, 2: 2.0}, AGAIN)[-1] == 1
    assert run(threads, {1: 1.0, 2: 0.5}, 20 * AGAIN)[-1] == 2


def test_a_launch_leaves_the_number_as_it_was() -> None:
    before = torch.get_num_threads()
    threads = Threads(2)
    try:
        torch.set_num_threads(2)
        seen = []
        for _ in range(4):
            with threads.launch("core", 3):
                seen.append(torch.get_num_threads())
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError), threads.launch("core", 3):
            raise ValueError
        assert torch.get_num_threads() == 2 and set(seen) == {1, 2}
    finally:
        torch.set_num_threads(before)


def test_engines_of_a_model_share_what_is_known_and_bits_are_not_left_to_it() -> None:
    model = small()
    engine = Engine(model, Options(width=2))
    assert engine.threads is threads_for(model) is Engine(model, Options(width=4)).threads
    assert engine.threads is not threads_for(small())
    assert Engine(model, Options(width=2, deterministic=True)).threads is None

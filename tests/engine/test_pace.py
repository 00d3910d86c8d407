"""How many tokens the coda waits for: what a simulation says, against what is known."""

from __future__ import annotations

from collections import Counter

import pytest

from alcoda.engine.pace import LEAST, SIMULATED, LaunchTime, best_min_coda, seconds_per_token


def takes(fixed_s: float, row_s: float = 0.0) -> LaunchTime:
    """As fitted to launches of 1 to 8 rows."""
    found = LaunchTime()
    for rows in range(1, 9):
        found.add(rows, fixed_s + row_s * rows)
    return found


def test_a_line_is_found_from_launches() -> None:
    found = takes(3.0, 0.5)
    assert (found.fixed_s, found.row_s) == pytest.approx((3.0, 0.5))
    alike = LaunchTime()
    for _ in range(5):
        alike.add(4, 2.0)
    assert (alike.fixed_s, alike.row_s) == (2.0, 0.0), "all launches were alike: their mean"
    assert (LaunchTime().fixed_s, LaunchTime().row_s) == (0.0, 0.0)


@pytest.mark.parametrize("n_running", [2, 8, 32])
def test_tokens_of_one_depth_go_in_step(n_running: int) -> None:
    """In step, a token takes 1 / n of the launches of its loops and one of the coda."""
    fixed, n_tokens = Counter({8: 10}), max(SIMULATED * n_running, LEAST)

    def ratio(k: int) -> float:
        return seconds_per_token(k, n_running, fixed, takes(1.0), takes(1.0)) / (9 / n_running)

    begun = 1.5 * n_running / n_tokens  # those that are found out of step
    assert ratio(best_min_coda(n_running, fixed, takes(1.0), takes(1.0))) == pytest.approx(1, rel=begun)
    assert ratio(n_running) == pytest.approx(1, rel=begun) and ratio(1) > 1.1


def test_rows_that_cost_all_there_is_do_not_wait() -> None:
    """Where a launch costs nothing but its rows, waiting gains nothing; where the coda is dear, it does."""
    spread = Counter({1: 1, 2: 1, 4: 1, 8: 1})
    free = [seconds_per_token(k, 8, spread, takes(0.0, 1.0), takes(0.0, 1.0)) for k in (1, 4, 8)]
    assert max(free) == pytest.approx(min(free), rel=0.05)
    assert best_min_coda(8, spread, takes(1.0), takes(0.01)) == 1
    assert best_min_coda(8, spread, takes(0.01), takes(1.0)) == 8


def test_nothing_is_known_yet() -> None:
    for n_running, loops, core, coda in (
        (1, Counter({3: 1}), takes(1.0), takes(9.0)),
        (8, Counter(), takes(1.0), takes(9.0)),
        (8, Counter({3: 1}), LaunchTime(), takes(9.0)),
        (8, Counter({3: 1}), takes(1.0), LaunchTime()),
    ):
        assert best_min_coda(n_running, loops, core, coda) == 1

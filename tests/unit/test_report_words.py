"""Small parts of the report: smoothed lines, numbers in words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alcoda.report.curves import smooth, thin
from alcoda.report.markup import duration, esc, human


def test_smooth_is_a_centred_mean() -> None:
    line_N = np.arange(1000.0)
    mean_N, window = smooth(line_N)
    assert window == 21
    np.testing.assert_allclose(mean_N[10:-10], line_N[10:-10])
    assert mean_N[0] == 5.0
    holes_N = line_N.copy()
    holes_N[500] = math.nan
    assert smooth(holes_N)[0][500] == pytest.approx(500.0)
    assert math.isnan(smooth(np.array([math.nan]))[0][0])
    assert len(smooth(np.array([]))[0]) == 0


def test_thin_keeps_peaks_and_ends() -> None:
    y_N = np.zeros(100_000)
    y_N[54_321] = 9.0
    x_N, thin_N = thin(np.arange(100_000), y_N)
    assert len(x_N) <= 502
    assert 54_321 in x_N and x_N[0] == 0 and x_N[-1] == 99_999
    assert thin_N.max() == 9.0


def test_words_for_numbers() -> None:
    assert [human(v) for v in (0, 999, 999.6, 1000, 12_345_678, 9.999e11)] == [
        "0",
        "999",
        "1.00 k",
        "1.00 k",
        "12.3 M",
        "1.00 T",
    ]
    assert human(10_240, "B") == "10.2 kB"
    assert human(math.nan) == "not a number"
    assert [duration(s) for s in (3.25, 75, 4980, 200_000)] == ["3.25 s", "1 min 15 s", "1 h 23 min", "2 d 7 h"]
    assert esc("a\r\nb\x1b<\ud800") == "a\nb\u241b&lt;\ufffd"

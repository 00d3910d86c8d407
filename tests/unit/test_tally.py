"""Groups of tokens with known depths; answers of pointer chasing; the table of tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from alcoda.data.hops import answers
from alcoda.measure.bootstrap import mean_interval, ratio_interval
from alcoda.measure.columns import parquet_file
from alcoda.measure.lab import hops_of
from alcoda.measure.tally import Tally

R = 4


def tally() -> Tally:
    """Two sources of two units; the first unit is shallow, and half of the last one is censored."""
    found = Tally(R, 8)
    for source, (depths, censored) in enumerate([([2, 2, 2, 3, 3, 3], 0), ([2, 4, 4, 3, 4, 4], 2)]):
        n = len(depths)
        found.add(
            np.tile(np.array([False, False, True, True]), (n, 1)),
            unit=np.repeat([0, 1], n // 2),
            settled=np.array(depths, np.int16),
            censored=np.arange(n) >= n - censored,
            crossing=np.array(depths, np.int16) - 1,
            stable=np.ones(n, np.int16),
            kind=np.full(n, source, np.uint8),
            pos=np.arange(n) % 8,
            hops=np.array([0, 0, 1, 0, 0, 2], np.uint8),
            loss=np.arange(n, dtype=np.float32) + 10 * source,
        )
        found.close(2)
    return found


def test_groups_of_known_depths() -> None:
    found = tally()
    every = found.group("all")
    assert every.n_tokens == 12 and every.share == 1 and every.mean == 3 and every.median == 3 and every.q90 == 4
    assert every.censored == pytest.approx(2 / 12) and every.first_crossing == 2 and every.stable_loop == 1
    assert every.low is not None and every.high is not None and 2 <= every.low < 3 < every.high <= 4
    first, second = found.groups(found["kind"], ["a", "b", "nobody"])
    assert (first.name, first.mean, second.mean) == ("a", 2.5, 3.5) and first.share == 0.5
    assert found.units_held() == 4


def test_one_unit_has_no_interval() -> None:
    found = tally()
    one = found.group("unit 0", found["unit"] == 0)
    assert (one.mean, one.low, one.high) == (2, None, None)


def test_every_token_is_in_one_group() -> None:
    found = tally()
    for groups in (found.by_position(), found.by_difficulty()):
        assert sum(one.n_tokens for one in groups) == 12
    easy = found.by_difficulty()
    assert [one.loss for one in easy] == sorted(one.loss for one in easy)
    assert found.by_position()[0].name == "0 to 0"
    assert [(one.name, one.n_tokens, one.mean) for one in found.by_hops()] == [("1 hop", 2, 3.0), ("2 hops", 2, 3.5)]
    assert found.correct[1].tolist() == [0, 0, 2, 2]


def test_histogram_counts_every_token_once() -> None:
    histogram = tally().histogram()
    assert [one["depth"] for one in histogram] == [1, 2, 3, 4]
    assert [one["settled"] for one in histogram] == [0, 4, 4, 2] and histogram[-1]["censored"] == 2
    for name in ("first_crossing", "stable_loop"):
        assert sum(one[name] for one in histogram) == 12


def test_mean_interval_is_the_ratios() -> None:
    rng = np.random.default_rng(0)
    sums, counts = rng.uniform(1, 5, 40), rng.integers(1, 9, 40).astype(float)
    mean, ratio = mean_interval(sums, counts), ratio_interval(sums, counts)
    assert mean.value == pytest.approx(sums.sum() / counts.sum())
    assert [x / np.log(2) for x in mean] == pytest.approx(list(ratio), rel=1e-12)


def test_an_answer_is_of_the_token_that_ends_it() -> None:
    text = b"hops: A B; B A? 2 A A? 1 B A"
    assert answers(text) == [(19, 21, 2), (26, 28, 1)]
    assert [text[start:stop] for start, stop, _ in answers(text)] == [b" A", b" A"]
    single = [bytes([b]) for b in text]
    assert {int(i): int(hops_of(single)[i]) for i in hops_of(single).nonzero()[0]} == {20: 2, 27: 1}
    words = [text[:19], b" A", text[21:26], b" A"]
    assert hops_of(words).tolist() == [0, 2, 0, 1]
    assert hops_of([b"no such text"]).tolist() == [0]


def test_a_table_is_whole_or_not_there(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "tokens.parquet"
    with parquet_file(path) as write:
        for start in (0, 2):
            write(
                {
                    "place": np.arange(start, start + 2),
                    "class": ["a", "b"],
                    "kl": np.arange(6, dtype=np.float32).reshape(2, 3) + start,
                }
            )
    table = pq.read_table(path)
    assert table.column("place").to_pylist() == [0, 1, 2, 3] and table.column("class").to_pylist() == list("abab")
    assert table.column("kl").to_pylist()[3] == [5, 6, 7]
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), parquet_file(path) as write:
        write({"place": np.arange(5)})
        raise KeyboardInterrupt
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["tokens.parquet"]


def test_without_pyarrow_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # pyrefly: ignore
    with parquet_file(tmp_path / "tokens.parquet") as write:
        write({"place": np.arange(2)})
    assert "pip install pyarrow" in capsys.readouterr().err and not list(tmp_path.iterdir())

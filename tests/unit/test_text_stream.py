"""Text of a stream of tokens: equal to what the whole text, cut at the first stop string, is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alcoda.engine.text import TextStream, check_stop
from alcoda.errors import UsageError


class Pieces:
    """A tokenizer whose tokens are the places in a list of bytes."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode_bytes(self, ids: Any) -> bytes:
        return b"".join(self.pieces[i] for i in ids)


def stream_of(pieces: list[bytes], stop: list[str]) -> TextStream:
    return TextStream(Pieces(pieces), stop)  # type: ignore[arg-type]


def decoded(pieces: list[bytes]) -> str:
    """Of whole characters only."""
    raw = b"".join(pieces)
    for n in range(min(4, len(raw) + 1)):
        try:
            raw[len(raw) - n :].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return raw[: len(raw) - n].decode(errors="replace")
    return raw.decode(errors="replace")


def first(text: str, stop: list[str]) -> int | None:
    return min((text.find(one) for one in stop if one in text), default=None)


def held_back(text: str, stop: list[str]) -> int:
    """The longest end of ``text`` that a stop string begins with."""
    return max((n for one in stop for n in range(len(one)) if n <= len(text) and text.endswith(one[:n])), default=0)


pieces_lists = st.lists(
    st.one_of(
        st.text("ab", max_size=3).map(str.encode),
        st.sampled_from([b"\xc3", b"\xa9", b"\xe6\xbc", b"\xa2", b"\xf0\x9f", b"\x8e\x89", "é漢🎉".encode(), b"\xff"]),
    ),
    max_size=12,
)
stops = st.lists(st.text("abé漢", min_size=1, max_size=4), max_size=4)


@given(pieces_lists, stops)
@example([b"a", b"ab"], ["aab"])
@example([b"aa", b"a", b"b"], ["aab"])  # a beginning of the string inside itself
@example([b"xa", b"b", b"cd", b"y"], ["bc", "abcd"])  # found, and one that begins before it may still come
@example([b"xa", b"b", b"c", b"cd"], ["bc", "abcd"])
@example([b"xabc"], ["bc", "abcd"])
@example([b"\xe6\xbc", b"\xa2\xe6"], ["漢"])
@example([b"\xe6\xbc", b"a"], ["a"])
@settings(deadline=None)
def test_stream_is_the_whole_text_cut_at_the_first_stop(pieces: list[bytes], stop: list[str]) -> None:
    whole = b"".join(pieces).decode(errors="replace")
    expected = whole[: first(whole, stop)]
    stream, given_out = stream_of(pieces, stop), ""
    for n in range(len(pieces)):
        given_out += stream.push(n)
        assert given_out == stream.text and expected.startswith(given_out)
        text = decoded(pieces[: n + 1])
        found, open_from = first(text, stop), len(text) - held_back(text, stop)
        if stream.stopped:
            assert found is not None and given_out == expected
            break
        # Decided as early as can be, and no more is held back than has to be.
        assert found is None or open_from < found
        assert given_out == text[:open_from]
    given_out += stream.finish()
    assert given_out == stream.text == expected
    assert stream.stopped == (first(whole, stop) is not None)
    # A token has part in the text if it has bytes, and its first character is given out.
    part = [n for n in range(len(pieces)) if pieces[n] and len(decoded(pieces[:n])) < len(given_out)]
    assert stream.n_kept == (part[-1] + 1 if part else 0)
    if stream.stopped:
        assert stream.push(0) + stream.finish() == "" and stream.text == expected


@given(st.text("abc", max_size=30), st.text("abc", min_size=1, max_size=3), st.integers(1, 4))
@settings(deadline=None)
def test_one_stop_is_split(text: str, stop: str, n: int) -> None:
    pieces = [text[i : i + n].encode() for i in range(0, len(text), n)]
    stream = stream_of(pieces, [stop])
    assert "".join(map(stream.push, range(len(pieces)))) + stream.finish() == text.split(stop)[0]


def test_characters_over_token_borders() -> None:
    pieces = [bytes([byte]) for byte in "é🎉!".encode()]
    stream = stream_of(pieces, [])
    assert [stream.push(n) for n in range(7)] == ["", "é", "", "", "", "🎉", "!"]
    assert stream.finish() == "" and not stream.stopped and stream.n_kept == 7
    cut = stream_of(pieces, [])
    assert [cut.push(n) for n in range(4)] == ["", "é", "", ""] and cut.n_kept == 2
    assert cut.finish() == "\ufffd" and cut.text == "é\ufffd" and cut.n_kept == 4


def test_what_is_held_back_comes_when_it_is_no_stop() -> None:
    stream = stream_of([b"Hi\n", b"\n", b"x", b"\nU", b"ser", b":", b"!"], ["\n\n\n", "\nUser:"])
    assert [stream.push(n) for n in range(4)] == ["Hi", "", "\n\nx", ""]
    assert stream.n_kept == 3
    assert stream.push(4) == "" and not stream.stopped
    assert stream.push(5) == "" and stream.stopped and stream.text == "Hi\n\nx"
    assert stream.push(6) == "" and stream.finish() == "" and stream.n_kept == 3


def test_the_end_decides_what_is_open() -> None:
    stream = stream_of([b"xabc"], ["bc", "abcd"])
    assert stream.push(0) == "x" and not stream.stopped
    assert stream.finish() == "a" and stream.stopped and stream.text == "xa"
    stream = stream_of([b"one ", b"##"], ["###"])
    assert stream.push(0) + stream.push(1) == "one " and stream.n_kept == 1
    assert stream.finish() == "##" and not stream.stopped and stream.n_kept == 2


def test_tokens_that_are_kept() -> None:
    # The token in which the text ends counts, one without bytes only where a later one does.
    stream = stream_of([b"a", b"", b"b<", b"/x", b""], ["</x"])
    for n in range(5):
        stream.push(n)
    assert stream.text == "ab" and stream.n_kept == 3
    nothing = stream_of([b"<", b"/", b"x"], ["</x"])
    for n in range(3):
        nothing.push(n)
    assert nothing.stopped and nothing.text == "" and nothing.n_kept == 0


def test_a_long_stop_string_is_no_slower_than_the_text() -> None:
    # Compared again at each character it would take 10^9 steps, and this test's time.
    stop = "a" * 40_000 + "b"
    stream = stream_of([b"a" * 1000], [stop])
    assert not any(stream.push(0) for _ in range(40))
    assert stream.push(0) == "a" * 1000


def test_stops_that_can_be() -> None:
    assert check_stop(None) == () and check_stop("x") == ("x",) and check_stop(["a", "b"]) == ("a", "b")
    assert check_stop([]) == () and check_stop(("a",) * 4) == ("a",) * 4


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        (5, "stop=5: a string, or a list of 1 to 4 strings"),
        ({"a": 1}, "a string, or a list"),
        (["a", 5], "a string, or a list"),
        (b"a", "a string, or a list"),
        (list("abcde"), "stop: 5 strings; at most 4"),
        ("", "an empty string"),
        (["a", ""], "an empty string"),
    ],
)
def test_stops_that_cannot_be(stop: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_stop(stop)

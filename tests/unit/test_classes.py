"""Classes of tokens: of prose, of Python, of bytes, and of tokens that end inside a word or a character."""

from __future__ import annotations

import pytest

from alcoda.errors import UsageError
from alcoda.measure.classes import CLASSES, FUNCTION_WORDS, check_scheme, classify, lay, pick_scheme


def named(pieces: list[str | bytes], scheme: str) -> list[str]:
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return [CLASSES[scheme][i] for i in classify(raw, "code" if scheme == "code" else "text")]


TEXT: list[tuple[str, str]] = [
    ("The", "function_word"),
    (" ele", "word_start"),
    ("phant", "continuation"),
    ("'s", "continuation"),
    (" tr", "word_start"),
    ("unk", "continuation"),
    (",", "punctuation"),
    (" 42", "digits"),
    (".", "punctuation"),
    ("\n\n", "whitespace"),
    ("Th", "word_start"),
    ("e", "continuation"),
    (" thesis", "word_start"),
    (" of", "function_word"),
    (" ", "whitespace"),
    ("über", "word_start"),
    (' "', "punctuation"),
    ("And", "function_word"),
    ('"', "punctuation"),
    (" x2", "word_start"),
    ("3x", "other"),
]


def test_prose() -> None:
    assert named([piece for piece, _ in TEXT], "text") == [name for _, name in TEXT]


def test_a_word_is_a_function_word_only_if_it_is_whole() -> None:
    assert named([" the", "sis"], "text") == ["word_start", "continuation"]
    assert named([" the", " sis"], "text") == ["function_word", "word_start"]
    assert "elephant" not in FUNCTION_WORDS and {"the", "of", "not"} <= FUNCTION_WORDS


def test_bytes_and_tokens_inside_a_character() -> None:
    assert named([bytes([b]) for b in "a ü!".encode()], "text") == [
        "function_word",
        "whitespace",
        "word_start",
        "continuation",
        "punctuation",
    ]
    kanji = "漢".encode()
    assert named([b" ", kanji[:1], kanji[1:], b"\xff", b""], "text") == [
        "whitespace",
        "word_start",
        "continuation",
        "other",
        "other",
    ]


def test_laid_out_bytes_are_all_there() -> None:
    laid = lay(["漢".encode()[:2], "漢".encode()[2:] + b"a", b"", b"\xffb"])
    assert laid.spans[0] == (0, 1, True) and laid.spans[1] == (0, 2, False)
    assert laid.spans[2][0] == laid.spans[2][1]
    assert laid.text[1] == "a" and laid.text[laid.spans[3][1] - 1] == "b"


CODE: list[tuple[str, str]] = [
    ("def", "keyword"),
    (" long", "name"),
    ("_name", "continuation"),
    ("(", "operator"),
    ("x", "name"),
    ("):", "operator"),
    ("\n    ", "indentation"),
    ("# not", "comment"),
    (" def", "comment"),
    ("\n", "whitespace"),
    ("    ", "indentation"),
    ("ret", "keyword"),
    ("urn", "continuation"),
    (" 'if", "literal"),
    (" x'", "literal"),
    (" +", "operator"),
    (" 1", "literal"),
    ("2.5", "literal"),
    (" is", "keyword"),
    (" None", "literal"),
    ("\n", "whitespace"),
    ('"""doc', "literal"),
    ("\n  more", "literal"),
    ('"""', "literal"),
]


def test_python() -> None:
    assert named([piece for piece, _ in CODE], "code") == [name for _, name in CODE]


def test_source_that_is_cut_or_is_no_python_has_classes_too() -> None:
    for text in ("'''never closed", "x = 'open\ny", "\\ $ ? `", "\x00\x01", ""):
        assert len(named(list(text), "code")) == len(text)


def test_scheme_by_looks() -> None:
    assert pick_scheme("import os\n\ndef f(x):\n    return x\n\nclass A:\n    y = 3\n") == "code"
    assert pick_scheme("Once upon a time there was a class of elephants.\nThey would return home.\n" * 9) == "text"
    assert pick_scheme("") == "text"
    with pytest.raises(UsageError, match="auto, text, code"):
        check_scheme("prose")

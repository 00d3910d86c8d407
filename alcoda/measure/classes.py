"""Classes of tokens: what kind of text each stands for, seen with the text around it.

A token is bytes, and may begin or end inside a word or a character; its class is found in the text of its document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from keyword import kwlist, softkwlist
from typing import Literal, NamedTuple, get_args

import numpy as np

from alcoda.errors import UsageError

Scheme = Literal["text", "code"]
"""Which classes: of prose, or of Python source."""

OTHER = "other"
CLASSES: dict[str, tuple[str, ...]] = {
    "text": ("whitespace", "punctuation", "digits", "function_word", "word_start", "continuation", OTHER),
    "code": ("whitespace", "indentation", "keyword", "name", "operator", "literal", "comment", "continuation", OTHER),
}
"""By scheme. The index in its tuple stands for a class; `OTHER` is the last of each."""

_FUNCTION_WORDS = """
a an the this that these those each every either neither some any no all both half such what which whose
i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself
we us our ours ourselves they them their theirs themselves one who whom whoever whomever whatever whichever
someone somebody something anyone anybody anything everyone everybody everything nobody nothing none
about above across after against along among around as at before behind below beneath beside besides between
beyond but by despite down during except for from in inside into like near of off on onto out outside over past
per since through throughout till to toward towards under underneath until unto up upon via with within without
and or nor so yet if because although though while whereas unless than whether when whenever where wherever why
how am is are was were be been being have has had having do does did doing done will would shall should can
could may might must ought not there here then too very just
"""
FUNCTION_WORDS = frozenset(_FUNCTION_WORDS.split())
"""Determiners, pronouns, prepositions, conjunctions and auxiliaries of English: a closed list, in lower case."""

_SNIFF_BYTES = 1 << 16
_CODE_LINE = re.compile(
    r"\s*(def |class |import |from \S+ import |return\b|if .*:|elif .*:|else:|for .*:|while .*:|try:|except\b.*:|with "
    r".*:|raise\b|assert\b|@\w|self\.|[\w.\[\]]+ [-+*/|&]?= |[\w.]+\(.*\)$|#)"
)
_CODE_SHARE = 0.3
"""Of lines that are not blank, as many look like Python in code; prose has next to none."""


def pick_scheme(text: str) -> Scheme:
    """Whether a text is Python source: by the share of its lines that look like it."""
    lines = [line for line in text[:_SNIFF_BYTES].splitlines() if line.strip()]
    return "code" if sum(bool(_CODE_LINE.match(line)) for line in lines) > _CODE_SHARE * len(lines) else "text"


def check_scheme(name: str) -> None:
    """UsageError for a scheme that there is not."""
    if name not in ("auto", *get_args(Scheme)):
        raise UsageError(f"classes {name!r}: auto, {', '.join(get_args(Scheme))}")


def classify(pieces: Sequence[bytes], scheme: Scheme) -> np.ndarray:
    """The class of each token of one document, as an index into ``CLASSES[scheme]``, [N] (uint8).

    Args:
        pieces: the bytes of each token, in order; none of one that stands for no text, which is of class `OTHER`.
    """
    laid = lay(pieces)
    marks_C = _MARKS[scheme](laid.text)
    names = CLASSES[scheme]
    found_N = np.full(len(pieces), len(names) - 1, np.uint8)
    for i, (start, stop, whole) in enumerate(laid.spans):
        if stop > start:
            found_N[i] = names.index(_TOKEN[scheme](laid.text, marks_C, start, stop, whole))
    return found_N


class Laid(NamedTuple):
    """Tokens laid out on the text that they spell.

    Attributes:
        text: decoded; a byte that is no UTF-8 is one replacement character.
        spans: of each token the characters that it touches, ``start .. stop``, and whether it holds the first of them
            from its first byte on.
    """

    text: str
    spans: list[tuple[int, int, bool]]


def lay(pieces: Sequence[bytes]) -> Laid:
    """Where in their text the tokens are."""
    raw = b"".join(pieces)
    # Bytes that are no UTF-8 become one character each, so that every character's length in bytes is known.
    text = raw.decode("utf-8", "surrogateescape")
    lengths_C = np.fromiter((1 if "\udc80" <= c <= "\udcff" else len(c.encode()) for c in text), np.int64, len(text))
    starts_C = np.cumsum(lengths_C) - lengths_C
    ends_N = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
    begins_N = ends_N - np.fromiter(map(len, pieces), np.int64, len(pieces))
    first_N = np.searchsorted(starts_C, begins_N, side="right") - 1
    after_N = np.searchsorted(starts_C, ends_N, side="left")
    safe_N = first_N.clip(min=0)
    whole_N = starts_C[safe_N] == begins_N if len(text) else np.ones(len(pieces), bool)
    spans = [
        (int(first), int(after) if end > begin else int(first), bool(whole))
        for first, after, begin, end, whole in zip(safe_N, after_N, begins_N, ends_N, whole_N, strict=True)
    ]
    return Laid(text, spans)


def _is_word(char: str) -> bool:
    return char.isalpha() or char in "'’"


def _of_text(text: str, marks_C: np.ndarray, start: int, stop: int, whole: bool) -> str:
    own = text[start:stop]
    core = own.strip()
    if not core:
        return "whitespace"
    at = start + own.index(core)
    if core.isnumeric():
        return "digits"
    if not any(c.isalnum() for c in core):
        return OTHER if any("\udc80" <= c <= "\udcff" for c in core) else "punctuation"
    first = next(c for c in core if c not in "'’\"([{“‘-—")
    if not first.isalpha():
        return OTHER
    before = text[at - 1] if at else " "
    # In "don't", n't goes on; a quote that opens a word has no letter before it.
    if not whole or (_is_word(before) and before.isalpha()) or (before in "'’" and at > 1 and text[at - 2].isalpha()):
        return "continuation"
    word = re.match(r"[^\W\d_]+(?:['’][^\W\d_]+)?", text[at + core.index(first) :][:40])
    is_whole = word is not None and at + core.index(first) + word.end() <= stop
    return "function_word" if word and is_whole and word[0].lower() in FUNCTION_WORDS else "word_start"


_PYTHON = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<literal>[rbufRBUF]{0,2}(?:\"\"\"(?:\\.|[^\\])*?(?:\"\"\"|\Z)|'''(?:\\.|[^\\])*?(?:'''|\Z)
        |"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)
        |(?:0[xXoObB][\da-fA-F_]+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?[jJ]?))
    |(?P<name>[^\W\d]\w*)
    |(?P<whitespace>\s+)
    |(?P<operator>[-+*/%@&|^~<>=!:;,.()\[\]{}\\]+)
    |(?P<other>.)""",
    re.S | re.X,
)
_KEYWORDS = {*kwlist, *softkwlist} - {"True", "False", "None", "_", "type"}
_CONSTANTS = {"True", "False", "None"}
_FIRST = 128  # set on the first character of a piece of source


def _mark_python(text: str) -> np.ndarray:
    """Of each character the class of the piece of source that it is in, with `_FIRST` where one begins."""
    names = CLASSES["code"]
    marks_C = np.zeros(len(text), np.uint8)
    for found in _PYTHON.finditer(text):
        kind = found.lastgroup or OTHER
        if kind == "name":
            kind = "keyword" if found[0] in _KEYWORDS else "literal" if found[0] in _CONSTANTS else "name"
        start, stop = found.span()
        marks_C[start:stop] = names.index(kind)
        if kind == "whitespace" and ((line := found[0].rfind("\n")) >= 0 or start == 0):
            marks_C[start + line + 1 : stop] = names.index("indentation")
        marks_C[start] |= _FIRST
    return marks_C


def _of_python(text: str, marks_C: np.ndarray, start: int, stop: int, whole: bool) -> str:
    names = CLASSES["code"]
    own = text[start:stop]
    kinds_C = marks_C[start:stop] & ~np.uint8(_FIRST)
    if not own.strip():
        # Spaces inside a string or a comment are of it; of line breaks and what follows, indentation is what counts.
        return "indentation" if (kinds_C == names.index("indentation")).any() else names[int(kinds_C[-1])]
    at = next(i for i, c in enumerate(own) if not c.isspace())
    kind = names[int(kinds_C[at])]
    begins = (at > 0 or whole) and bool(marks_C[start + at] & _FIRST)
    return "continuation" if kind in ("name", "keyword") and not begins else kind


_TOKEN: dict[str, Callable[[str, np.ndarray, int, int, bool], str]] = {"text": _of_text, "code": _of_python}
_MARKS: dict[str, Callable[[str], np.ndarray]] = {"text": lambda text: np.zeros(0, np.uint8), "code": _mark_python}

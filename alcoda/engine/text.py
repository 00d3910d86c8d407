"""Token ids into text as they come: whole characters, ended by stop strings."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError

MAX_STOPS = 4


def check_stop(stop: object) -> tuple[str, ...]:
    """Stop strings of a request: None, one string, or a list of at most `MAX_STOPS`; or UsageError."""
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) for one in strings):
        raise UsageError(f"stop={stop!r}: a string, or a list of 1 to {MAX_STOPS} strings")
    if len(strings) > MAX_STOPS:
        raise UsageError(f"stop: {len(strings)} strings; at most {MAX_STOPS}")
    if "" in strings:
        raise UsageError("stop: an empty string is at the beginning of every text; leave it out")
    return tuple(strings)


class TextStream:
    """The text of tokens that come one by one, up to the first stop string.

    >>> stream = TextStream(tokenizer, ["\\n\\n"])
    >>> for token in tokens:
    ...     print(stream.push(token), end="")
    ...     if stream.stopped:
    ...         break
    >>> print(stream.finish(), end="")

    A character comes when all its bytes are there; what is no UTF-8 comes as U+FFFD. A stop string is looked for in the
    text, wherever tokens begin and end. What may still become one is held back, so that of a stop string and what
    follows it nothing is ever given out. Of stop strings that overlap the one that begins first counts, and where
    several begin there, any: the text in all is ``text[:min(found)]`` of the whole. So with stop strings "bc" and
    "abcd" the text "xabc" is not decided until one more character is there, or `finish` is called.

    Args:
        tokenizer: of the tokens.
        stop: stop strings (`check_stop`).

    Attributes:
        stopped: a stop string was found, and `text` is complete: tokens pushed after it are ignored.
        text: all that was given out.
        n_kept: how many of the tokens pushed, from the first, have part in `text`: up to the last one that has a byte
            in it, or that broke off a character which is in it as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped, self.text, self.n_kept = False, "", 0
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._searches = [_Search(one) for one in check_stop(list(stop))]
        self._held = ""  # decoded and not given out
        self._n_chars = 0  # decoded
        self._n_tokens = 0
        self._ends: int | None = None  # where the first stop string begins that was found
        # Of tokens of which nothing was given out yet: how many there were with it, and its first character's place.
        self._waiting: deque[tuple[int, int]] = deque()

    def push(self, token: int) -> str:
        """What is new in the text with one token more: often nothing."""
        if self.stopped:
            return ""
        raw = self._tokenizer.decode_bytes([token])
        self._n_tokens += 1
        if raw:
            self._waiting.append((self._n_tokens, self._n_chars))
        return self._take(self._decoder.decode(raw))

    def finish(self) -> str:
        """What was held back, when no token follows."""
        if self.stopped:
            return ""
        piece = self._take(self._decoder.decode(b"", final=True))
        self.stopped = self._ends is not None
        return piece + self._give(self._n_chars if self._ends is None else self._ends)

    def _take(self, piece: str) -> str:
        self._held += piece
        if not self._searches:
            self._n_chars += len(piece)
            return self._give(self._n_chars)
        for char in piece:
            self._n_chars += 1
            for search in self._searches:
                if search.step(char):
                    begins = self._n_chars - search.n_matched
                    self._ends = begins if self._ends is None else min(begins, self._ends)
            if self._ends is not None:
                # What begins later than what is found decides nothing.
                self._searches = [s for s in self._searches if self._n_chars - s.n_matched < self._ends]
                if not self._searches:
                    self.stopped = True
                    return self._give(self._ends)
        return self._give(self._n_chars - max(search.n_matched for search in self._searches))

    def _give(self, end: int) -> str:
        """Text up to the character ``end``, of what was not given out."""
        n = end - len(self.text)
        piece, self._held = self._held[:n], self._held[n:]
        self.text += piece
        while self._waiting and self._waiting[0][1] < end:
            self.n_kept = self._waiting.popleft()[0]
        return piece


class _Search:
    """A string looked for in text that comes character by character (Knuth, Morris and Pratt 1977).

    ``n_matched``: how long a beginning of the string the text so far ends with, the longest there is.
    """

    def __init__(self, string: str) -> None:
        self.string, self.n_matched = string, 0
        # Of each beginning of the string, the longest beginning that it ends with, itself apart.
        self._shorter = [0] * len(string)
        for k in range(1, len(string)):
            n = self._shorter[k - 1]
            while n and string[n] != string[k]:
                n = self._shorter[n - 1]
            self._shorter[k] = n + (string[n] == string[k])

    def step(self, char: str) -> bool:
        """Whether the text with ``char`` ends with the string. After that it takes no more."""
        n = self.n_matched
        while n and self.string[n] != char:
            n = self._shorter[n - 1]
        self.n_matched = n + (self.string[n] == char)
        return self.n_matched == len(self.string)

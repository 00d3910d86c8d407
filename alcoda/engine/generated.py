"""Completions as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from alcoda.data.tokenizer import Tokenizer
from alcoda.engine.request import Completion, Finish, Token
from alcoda.engine.text import TextStream
from alcoda.errors import RunError


class Texts:
    """The text of a request's completions, and where stop strings end them: a request's ``halt``.

    Args:
        stop: stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.by_stream: dict[int, TextStream] = {}

    def of(self, completion: Completion) -> TextStream:
        """Of one completion."""
        found = self.by_stream.get(completion.stream)  # whoever asked asks in its own thread, the engine in its
        return found or self.by_stream.setdefault(completion.stream, TextStream(self.tokenizer, self.stop))

    def __call__(self, completion: Completion, token: int) -> bool:
        text = self.of(completion)
        text.push(token)
        return text.stopped


@dataclass(frozen=True)
class Generated:
    """What follows a prompt.

    Attributes:
        prompt: as it was given.
        text: that follows it; with an error, what there was of it.
        tokens: of the text, with the loops that each was drawn after; of a traced request, what each loop did.
        finish: ``stop`` (the end of the text, or a stop string), ``length``, ``cancelled``, ``error``.
        error: what was wrong; None: nothing.
        prompt_tokens: with the one that begins a document.
        prompt_loops: that each of those ran.
    """

    prompt: str
    text: str
    tokens: tuple[Token, ...]
    finish: Finish
    error: str | None = None
    prompt_tokens: int = 0
    prompt_loops: tuple[int, ...] = ()

    @property
    def mean_loops(self) -> float:
        """Of the tokens that those of the text were drawn from."""
        return sum(token.loops for token in self.tokens) / len(self.tokens) if self.tokens else 0.0

    @classmethod
    def of(cls, completion: Completion, prompt: str, texts: Texts) -> Generated:
        """A completion that has ended."""
        assert completion.finish is not None
        text = texts.of(completion)
        text.finish()
        # A stop string and what it begins in are no part of the text.
        n_kept = text.n_kept if text.stopped else len(completion.tokens)
        return cls(
            prompt,
            text.text,
            tuple(completion.tokens[:n_kept]),
            completion.finish,
            completion.error,
            len(completion.request.prompt),
            tuple(completion.prompt_loops),
        )


class Pieces(Iterator[str]):
    """The text of one completion, piece by piece as it comes, each piece whole characters.

    Attributes:
        completion: that it is of: its tokens so far, and the loops of each.
    """

    def __init__(self, completion: Completion, texts: Texts, step: Callable[[], bool]) -> None:
        """``step`` does some of the work, and says whether any was left."""
        self.completion, self._text, self._step, self._given = completion, texts.of(completion), step, 0

    def __next__(self) -> str:
        while True:
            if len(self._text.text) > self._given:
                piece = self._text.text[self._given :]
                self._given = len(self._text.text)
                return piece
            if self.completion.finish is not None:
                self._text.finish()
                if len(self._text.text) > self._given:
                    continue
                if self.completion.error is not None:
                    raise RunError(self.completion.error)
                raise StopIteration
            if not self._step() and self.completion.finish is None:
                raise AssertionError("the engine is idle and the text has not ended")

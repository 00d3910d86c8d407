"""Texts as what is scored: a context and its continuation in token ids, as lm-eval's own ``hf`` model makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from alcoda.data.tokenizer import Tokenizer
from alcoda.errors import UsageError


class Ask(NamedTuple):
    """How likely is ``continuation`` after ``context``? Both are token ids; the context is not empty."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    def pieces(self, seq_len: int) -> Iterator[Ask]:
        """This in pieces of at most ``seq_len`` tokens to be scored, each behind all that is before it: the sum of
        their log-likelihoods is its own, as far back as the model sees."""
        for start in range(0, len(self.continuation), seq_len):
            before = (*self.context, *self.continuation[:start])
            yield Ask(before, self.continuation[start : start + seq_len])

    def row(self, seq_len: int) -> tuple[int, ...]:
        """What the model reads of a piece, at most ``seq_len`` tokens, cut from the left: all but the last token."""
        return (*self.context, *self.continuation)[-(seq_len + 1) :][:-1]


class Encoder:
    """Makes `Ask`s of texts.

    Args:
        bos: whether every text begins with the token that documents of training begin with (end-of-text). Without it a
            text begins with its first token, as with lm-eval's ``hf`` of a tokenizer that adds none.
    """

    def __init__(self, tokenizer: Tokenizer, bos: bool = False) -> None:
        self.tokenizer, self.bos, self.begin = tokenizer, bos, tokenizer.bos

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Ask]:
        """Contexts and continuations. Spaces at the end of a context go to its continuation, both are encoded as one
        text, and the tokens behind those of the context alone are the continuation's. An empty context is the token
        that begins a document.

        Raises:
            UsageError: a continuation of no token.
        """
        moved = [_spaces_moved(context, continuation) for context, continuation in texts]
        # Contexts come again with every choice: each is encoded once.
        contexts = list(dict.fromkeys(context for context, _ in moved))
        encoded = self.tokenizer.encode_batch([*contexts, *(context + after for context, after in moved)])
        of_context = {text: ids_T.tolist() for text, ids_T in zip(contexts, encoded, strict=False)}
        asks = []
        for (context, after), whole_T in zip(moved, encoded[len(contexts) :], strict=True):
            before = of_context[context]
            # Where the context's last word goes on, the whole may have no more tokens than it: then each by itself.
            continuation = tuple(whole_T.tolist()[len(before) :]) or tuple(self.tokenizer.encode(after).tolist())
            if not continuation:
                raise UsageError(f"the continuation {after!r} behind {context[-40:]!r} has no token: nothing to score")
            asks.append(Ask((*((self.begin,) if self.bos or not before else ()), *before), continuation))
        return asks

    def texts(self, texts: Sequence[str]) -> list[Ask]:
        """Whole texts, behind the token that begins a document."""
        return [Ask((self.begin,), tuple(ids_T.tolist())) for ids_T in self.tokenizer.encode_batch(texts)]


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation

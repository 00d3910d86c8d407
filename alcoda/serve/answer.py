"""What a client is sent: completions as OpenAI's objects, whole or in events, with ours beside them.

Both forms are made of the same pieces (`Pieces.take`), so that a stream, put together, is the whole answer.
"""

from __future__ import annotations

import codecs
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from alcoda.serve.call import Call, Choice, spent
from alcoda.serve.errors import to_json
from alcoda.serve.worker import new_id

if TYPE_CHECKING:
    from alcoda.data.tokenizer import Tokenizer
    from alcoda.engine.request import Token

LEAST = -9999.0
"""In place of a logarithm of 0, which JSON cannot write; as OpenAI's."""


@dataclass(eq=False)
class Entry:
    """A token of an answer.

    Attributes:
        text: what it adds to the text: of a character in pieces, all of it at its last.
        raw: its own bytes.
        offset: where ``text`` begins in the answer's text.
        logprob, top: None and nothing where they were not asked for, or there is none (the first of a prompt).
        token: as the engine drew it; None: of the prompt.
    """

    id: int
    text: str
    raw: bytes
    offset: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    token: Token | None = None


@dataclass(eq=False)
class Piece:
    """What is new of a choice."""

    text: str
    entries: list[Entry]
    finish: str | None


@dataclass(eq=False)
class Pieces:
    """The text of one choice as it is given out."""

    call: Call
    choice: Choice
    n_chars: int = 0
    _end: int = 0
    _offset: int = 0
    _n_decoded: int = 0
    _n_told: int = 0
    _held: deque[Entry] = field(default_factory=deque)
    _decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace"))
    _is_begun: bool = False

    def take(self) -> Piece:
        """All that is new since the last call."""
        choice, plan = self.choice, self.call.plan
        entries: list[Entry] = []
        prompt = ""
        if not self._is_begun:
            self._is_begun = True
            if plan.echo:
                entries = self._prompt()
                prompt = "".join(entry.text for entry in entries)
                self._offset = self._end = len(prompt)
        if choice.completion is None or choice.text is None:
            return Piece(prompt, entries, choice.finish)
        text = choice.text.text[self.n_chars : choice.n_chars]
        if plan.logprobs is not None or plan.returns_loops:
            entries += self._tokens(len(text))
        self.n_chars = choice.n_chars
        return Piece(prompt + text, entries, choice.finish)

    def _tokens(self, n_chars: int) -> list[Entry]:
        """Tokens all of whose text was given out by now, and that were not told of yet. What a stop string begins in
        is cut there, so that together they are the text."""
        choice, tokenizer = self.choice, self.call.worker.lm.tokenizer
        assert choice.completion is not None
        self._end += n_chars
        for token in choice.completion.tokens[self._n_decoded : choice.n_tokens]:
            raw = tokenizer.decode_bytes([token.token])
            text = self._decoder.decode(raw)
            self._held.append(Entry(token.token, text, raw, self._offset, token.logprob, token.top, token))
            self._offset += len(text)
        self._n_decoded = choice.n_tokens
        is_over = choice.finish is not None
        if is_over and self._held:
            self._held[-1].text += self._decoder.decode(b"", final=True)  # a character that was broken off
        found: list[Entry] = []
        while self._held and self._n_told < choice.n_kept:
            entry = self._held[0]
            if not is_over and entry.offset + len(entry.text) > self._end:
                break
            entry.text = entry.text[: max(0, self._end - entry.offset)]
            found.append(self._held.popleft())
            self._n_told += 1
        return found

    def _prompt(self) -> list[Entry]:
        call, tokenizer = self.call, self.call.worker.lm.tokenizer
        ids = call.plan.prompts[self.choice.prompt]
        scores = call.scores[self.choice.prompt] if call.plan.scores else None
        decoder, found, offset = codecs.getincrementaldecoder("utf-8")(errors="replace"), [], 0
        for i, token in enumerate(ids):
            raw = tokenizer.decode_bytes([token])
            text = decoder.decode(raw, final=i == len(ids) - 1)
            score = scores[i - 1] if scores is not None and i else None
            logprob, top = (None, ()) if score is None else (score.logprob, score.top)
            found.append(Entry(token, text, raw, offset, logprob, top))
            offset += len(text)
        return found


class Answer:
    """All of one call.

    Args:
        call: that has been started.
    """

    def __init__(self, call: Call) -> None:
        self.call, self.plan = call, call.plan
        self.tokenizer: Tokenizer = call.worker.lm.tokenizer
        kind = "chat.completion" if self.plan.is_chat else "text_completion"
        self.head = {
            "id": new_id("chatcmpl" if self.plan.is_chat else "cmpl"),
            "object": kind,
            "created": int(time.time()),
            "model": self.plan.model,
            "system_fingerprint": f"fp_{call.worker.lm.loaded.train_step}",
        }
        self.chunk_head = self.head | {"object": "chat.completion.chunk" if self.plan.is_chat else kind}
        # What is the same in every event is written once.
        self._before = b"data: " + to_json(self.chunk_head)[:-1] + b',"choices":['
        self._after = b',"usage":null}\n\n' if self.plan.include_usage else b"}\n\n"
        self.pieces = [Pieces(call, choice) for choice in call.choices]
        self._n_ended = 0

    # -- whole --------------------------------------------------------------------------------------------------------

    def whole(self) -> bytes:
        """The answer, once all has ended."""
        choices = [self._choice(pieces.choice, pieces.take()) for pieces in self.pieces]
        return to_json({**self.head, "choices": choices, "usage": self.usage(), "alcoda": self.summary()})

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        found: dict[str, Any] = {"index": choice.index}
        if self.plan.is_chat:
            found["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
        else:
            found["text"] = piece.text
        found |= {"logprobs": self._logprobs(piece.entries), "finish_reason": piece.finish}
        if self.plan.returns_loops:
            n, loops = (0, 0) if choice.completion is None else spent(choice.completion)
            found["alcoda"] = {
                "tier": self.plan.depth.tier,
                "tokens": self._told(piece.entries),
                "mean_loops": loops / n if n else 0.0,
            }
        return found

    # -- in events ----------------------------------------------------------------------------------------------------

    def first(self) -> bytes:
        """Of a chat: who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choices = [
            {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None} for one in self.call.choices
        ]
        return b"".join(map(self._event, choices))

    def chunk(self, choice: Choice) -> bytes:
        """What is new of a choice, as an event; nothing where nothing is."""
        piece = self.pieces[choice.index].take()
        if not (piece.text or piece.entries or piece.finish):
            return b""
        found: dict[str, Any] = {"index": choice.index}
        if self.plan.is_chat:
            found["delta"] = {"content": piece.text} if piece.text else {}
        else:
            found["text"] = piece.text
        found |= {"logprobs": self._logprobs(piece.entries), "finish_reason": piece.finish}
        if self.plan.returns_loops:
            found["alcoda"] = {"tokens": self._told(piece.entries)}
        self._n_ended += piece.finish is not None
        is_last = piece.finish is not None and self._n_ended == len(self.pieces)
        tells = is_last and not self.plan.include_usage
        return self._event(found, b',"alcoda":' + to_json(self.summary()) if tells else b"")

    def last(self) -> bytes:
        """The usage where it was asked for, and the end."""
        usage = b""
        if self.plan.include_usage:
            head = {**self.chunk_head, "choices": [], "usage": self.usage(), "alcoda": self.summary()}
            usage = b"data: " + to_json(head) + b"\n\n"
        return usage + b"data: [DONE]\n\n"

    def _event(self, choice: dict[str, Any], more: bytes = b"") -> bytes:
        return b"".join((self._before, to_json(choice), b"]", more, self._after))

    # -- parts --------------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens and loops of all choices; of n choices the prompt counts once."""
        ran = [spent(choice.completion) for choice in self.call.choices if choice.completion is not None]
        tokens, loops = sum(n for n, _ in ran), sum(loops for _, loops in ran)
        prompt = sum(map(len, self.plan.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "completion_tokens_details": {
                "loops": loops,
                "mean_loops": loops / tokens if tokens else 0.0,
                "full_depth_loops": tokens * self.call.full_loops,
            },
        }

    def summary(self) -> dict[str, Any]:
        """How deep it went."""
        depth, details = self.plan.depth, self.usage()["completion_tokens_details"]
        return {
            "tier": depth.tier,
            "exit": depth.exit,
            "mean_loops": details["mean_loops"],
            "max_loops": depth.max_loops,
        }

    def _told(self, entries: Sequence[Entry]) -> list[dict[str, Any]]:
        """Tokens with their loops; those of a prompt have none here."""
        found = []
        for entry in entries:
            if entry.token is None:
                continue
            one: dict[str, Any] = {"text": entry.text, "id": entry.id, "loops": entry.token.loops}
            if self.plan.returns_steps:
                one["steps"] = [
                    {
                        "state_change": _finite(step.state_change),
                        "kl": _finite(step.kl),
                        "top": [[self._text(i), _logprob(logprob)] for i, logprob in step.top],
                    }
                    for step in entry.token.steps
                ]
            found.append(one)
        return found

    def _logprobs(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if self.plan.logprobs is None:
            return None
        if self.plan.is_chat:
            return {"content": [self._chat_logprob(entry) for entry in entries], "refusal": None}
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _logprob(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry.logprob is None else self._tops(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _tops(self, entry: Entry) -> dict[str, float]:
        """By text, with the token itself where it is not among them, as OpenAI's. Of tokens of one text (parts of
        characters) the likeliest."""
        found: dict[str, float] = {}
        own = () if entry.logprob is None or not entry.top else ((entry.id, entry.logprob),)
        for i, logprob in (*entry.top, *own):
            text = self._text(i)
            found[text] = max(_logprob(logprob), found.get(text, LEAST))
        return found

    def _chat_logprob(self, entry: Entry) -> dict[str, Any]:
        top = [
            {"token": self._text(i), "logprob": _logprob(logprob), "bytes": list(self.tokenizer.decode_bytes([i]))}
            for i, logprob in entry.top
        ]
        return {
            "token": self._text(entry.id),
            "logprob": None if entry.logprob is None else _logprob(entry.logprob),
            "bytes": list(entry.raw),
            "top_logprobs": top,
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.decode_bytes([token]).decode(errors="replace")


def _logprob(number: float) -> float:
    return number if math.isfinite(number) else LEAST


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None

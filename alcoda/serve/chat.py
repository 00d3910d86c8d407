"""Messages into the tokens of a prompt.

A tokenizer's own template is used where the run has one (`alcoda.data.chat_template`), else a plain one, which a base
model continues like a play. What messages say never becomes a
special token: a template's special tokens are found in the text that it makes, after those in the messages were broken
up by a character that no text has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from alcoda.data.chat_template import SPECIALS
from alcoda.serve.errors import ApiError
from alcoda.serve.protocol import Message

if TYPE_CHECKING:
    from alcoda.data.tokenizer import Tokenizer

GUARD = "\ufdd0"
"""A code point that Unicode keeps from being a character."""
NAMES = {"system": "System", "developer": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
NO_SPECIALS = dict.fromkeys(SPECIALS, "")
"""A template that needs one sets it itself."""
ANSWER = "an answer of which nothing is like it"
PLAIN_STOPS = ("\nUser:", "\nSystem:", "\nTool:")


class Chat:
    """Of one model.

    Args:
        template: that stands alone; None: a plain one.

    Attributes:
        has_template: whether the template is the model's own.
        stops: strings that end an answer beside the request's.
        stop_ids: the special token that the template puts after an answer, which ends one too.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self.tokenizer, self.has_template = tokenizer, template is not None
        self.stops: tuple[str, ...] = () if template is not None else PLAIN_STOPS
        self._template = None if template is None else _compile(template)
        self.stop_ids = self._after_an_answer()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ApiError: the template refuses the messages.
        """
        if self._template is None:
            lines = [f"{NAMES[message.role]}: {message.text()}" for message in messages]
            text = "\n".join([*lines, f"{NAMES['assistant']}:"])
            return (self.tokenizer.bos, *self.tokenizer.encode(text).tolist())
        told = [
            {"role": message.role, "content": self._guarded(message.text())}
            | ({} if message.name is None else {"name": self._guarded(message.name)})
            for message in messages
        ]
        try:
            text = self._template.render(messages=told, add_generation_prompt=True, tools=None, **NO_SPECIALS)
        except Exception as error:  # a template may raise anything, and what it says is meant for the client
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None
        return self._encode(text)

    def _after_an_answer(self) -> frozenset[int]:
        if self._template is None or self._pattern is None:
            return frozenset()
        told = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self._template.render(messages=told, add_generation_prompt=False, tools=None, **NO_SPECIALS)
        except Exception:  # such a conversation is not for it
            return frozenset()
        _, answer, rest = text.rpartition(ANSWER)
        found = self._pattern.match(rest.lstrip()) if answer else None
        return frozenset() if found is None else frozenset({self.tokenizer.specials[found[0]]})

    def _guarded(self, text: str) -> str:
        text = text.replace(GUARD, "")
        pattern = self._pattern
        return text if pattern is None else pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)

    @property
    def _pattern(self) -> re.Pattern[str] | None:
        specials = sorted(self.tokenizer.specials, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, specials))) if specials else None

    def _encode(self, text: str) -> tuple[int, ...]:
        pattern, ids, at = self._pattern, [], 0
        for found in pattern.finditer(text) if pattern else ():
            ids += [*self._plain(text[at : found.start()]), self.tokenizer.specials[found[0]]]
            at = found.end()
        return (*ids, *self._plain(text[at:]))

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text.replace(GUARD, "")).tolist() if text else []


def _compile(template: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    helpers = {"raise_exception": refuse, "strftime_now": lambda form: ""}  # an answer is a function of the request
    return environment.from_string(template, globals=helpers)

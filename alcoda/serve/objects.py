"""What clients are sent, as openapi.json has it. `alcoda.serve.answer` writes these by hand, for speed; tests hold its
answers, whole and in events, against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


def _no_default(schema: dict[str, Any]) -> None:
    del schema["default"]


def _may() -> Any:
    """A field that is not always there, and is not null where it is."""
    return Field(default=None, json_schema_extra=_no_default)


class Sent(BaseModel):
    """A part of what is sent: all of its fields are known."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Details(Sent):
    loops: int
    """That the tokens ran, all together."""
    mean_loops: float
    full_depth_loops: int
    """That they would have run at full depth."""


class Usage(Sent):
    prompt_tokens: int
    completion_tokens: int
    """Drawn: with the token that ended the text, and those of a stop string."""
    total_tokens: int
    completion_tokens_details: Details


class DepthOfAnswer(Sent):
    tier: str | None
    exit: str
    """The tier's name, a rule with its threshold, or none: all loops."""
    mean_loops: float
    max_loops: int


class Step(Sent):
    """What one loop did to a token."""

    state_change: float | None
    kl: float | None
    """From the loop before; null of the first."""
    top: list[tuple[str, float]]
    """Likeliest tokens, with log-probabilities."""


class LoopsOfToken(Sent):
    text: str
    id: int
    loops: int
    steps: list[Step] = _may()
    """With return_trajectory."""


class DepthOfChoice(Sent):
    tier: str | None
    tokens: list[LoopsOfToken]
    mean_loops: float


class NewTokens(Sent):
    tokens: list[LoopsOfToken]


class Logprobs(Sent):
    tokens: list[str]
    token_logprobs: list[float | None]
    """Null of a prompt's first token."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Likely(Sent):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Sent):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[Likely]


class ChatLogprobs(Sent):
    content: list[ChatLogprob]
    refusal: None


Finish = Literal["stop", "length"]


class Choice(Sent):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish
    alcoda: DepthOfChoice = _may()
    """With return_loops."""


class AssistantMessage(Sent):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Sent):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    alcoda: DepthOfChoice = _may()
    """With return_loops."""


class ChunkChoice(Sent):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Finish | None
    """Null but in the last event of a choice."""
    alcoda: NewTokens = _may()
    """With return_loops."""


class Delta(Sent):
    role: Literal["assistant"] = _may()
    content: str = _may()
    refusal: None = _may()


class ChatChunkChoice(Sent):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    """Null but in the last event of a choice."""
    alcoda: NewTokens = _may()
    """With return_loops."""


class Head(Sent):
    id: str
    created: int
    """Seconds since 1970."""
    model: str
    """As it was asked for."""
    system_fingerprint: str


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage
    alcoda: DepthOfAnswer


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    alcoda: DepthOfAnswer


class Chunk(Head):
    """Of a stream; where usage was asked for, the last one has it and no choices."""

    usage: Usage | None = _may()
    """With stream_options.include_usage; null but in the last event."""
    alcoda: DepthOfAnswer = _may()
    """In the last event."""


class CompletionChunk(Chunk):
    object: Literal["text_completion"]
    choices: list[ChunkChoice]


class ChatCompletionChunk(Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class DepthOfModel(Sent):
    tier: str | None
    n_loops: int
    mean_loops: float
    """On the text that the tier was calibrated on."""
    max_loops: int
    """That a request may ask for."""
    context: int
    """Tokens, of prompt and answer."""
    is_chat: bool
    """Whether it has a chat template."""


class Model(Sent):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    alcoda: DepthOfModel


class Models(Sent):
    object: Literal["list"]
    data: list[Model]


class Tokens(Sent):
    tokens: list[int]
    texts: list[str]
    """Of each; of a part of a character, U+FFFD."""
    count: int
    max_model_len: int


class Health(Sent):
    status: Literal["ok"]


class Ready(Sent):
    status: Literal["ready"]
    models: list[str]


class Version(Sent):
    version: str


class ErrorText(Sent):
    message: str
    type: str
    param: str | None
    """The field that was wrong."""
    code: str | None


class Error(Sent):
    error: ErrorText

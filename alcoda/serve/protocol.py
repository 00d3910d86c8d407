"""What clients may send: OpenAI's fields, and ours.

A field that means something and is not there is refused (`UNSUPPORTED`), one that does no harm is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from alcoda.serve.errors import ApiError

MAX_SEED = (1 << 63) - 1
MANY = 4096
"""Of messages, parts, biases."""
MAX_TEXT = 1 << 16
"""Characters of a text that is only to be tokenised."""


def _whole(value: Any) -> Any:
    """2.0 is a whole number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _or(allowed: str) -> WrapValidator:
    """One message for a field of several forms."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("form", "{allowed}", {"allowed": allowed}) from None

    return WrapValidator(check)


Int = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Str = Annotated[str, Field(strict=True)]


class Body(BaseModel):
    """A part of what is sent."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class StreamOptions(Body):
    include_usage: Bool = False
    """Whether one more event at the end has the usage."""


class LoopBounds(Body):
    """Between which loops the exit decides."""

    model_config = ConfigDict(extra="forbid")
    min: Annotated[Int, Field(ge=1)] | None = None
    max: Annotated[Int, Field(ge=1)] | None = None


Threshold = Annotated[Float, Field(ge=0)]


class ExitChoice(Body):
    """An exit rule, docs/design/axes/exit.md."""

    model_config = ConfigDict(extra="forbid")
    rule: Str
    threshold: Threshold | Annotated[list[Threshold], Field(max_length=1000)] | None = None


Some = Annotated[Str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    Some | Annotated[list[Some], Field(max_length=4)] | None,
    _or("a string of 1 to 1,000 characters, or a list of at most 4"),
]
Bias = Annotated[Float, Field(ge=-100, le=100)]


class Common(Body):
    """Fields of both endpoints."""

    model: Str | None = None
    """NAME, NAME:TIER; null: the server's."""
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    temperature: Annotated[Float, Field(ge=0)] | None = None
    """1 where null; 0: the likeliest token each time."""
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Int, Field(ge=1)] | None = None
    """An extension."""
    min_p: Annotated[Float, Field(ge=0, lt=1)] | None = None
    """An extension."""
    repetition_penalty: Annotated[Float, Field(ge=0.01, le=100)] | None = None
    """An extension. Within bounds in which every logit stays finite."""
    n: Annotated[Int, Field(ge=1)] | None = None
    stop: Stop = None
    seed: Annotated[Int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[Annotated[str, Field(pattern=r"^[0-9]{1,18}$")], Bias], Field(max_length=MANY)] | None
    ) = None
    user: Str | None = None
    """Ignored."""
    ignore_eos: Bool | None = None
    """An extension: whether it goes on at the token that ends a text."""
    loops: Annotated[
        Annotated[Int, Field(ge=1)] | LoopBounds | None, _or('a whole number from 1, or {"min": a, "max": b}')
    ] = None
    """An extension: loops of every token; or between how many an exit decides."""
    exit: Annotated[
        Str | ExitChoice | None, _or('the name of a tier, "none", or {"rule": name, "threshold": number or list}')
    ] = None
    """An extension: when tokens leave the loop."""
    return_loops: Bool | None = None
    """An extension: whether each token's loops are told."""
    return_trajectory: Bool | None = None
    """An extension: whether what each loop did is told too."""
    timeout: Annotated[Float, Field(gt=0)] | None = None
    """An extension: seconds, after which the request is given up."""


def _is_ids(value: Any) -> bool:
    # A million of them are looked at in the time of one field of a model.
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def _prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    several = isinstance(value, list) and bool(value)
    is_texts = several and all(isinstance(one, str) for one in value)
    if isinstance(value, str) or is_texts or _is_ids(value) or (several and all(map(_is_ids, value))):
        return value
    raise PydanticCustomError(
        "form", "a string, a list of strings, a list of token ids, or a list of such lists; none of them an empty list"
    )


_SOME_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _SOME_IDS,
        {"type": "array", "minItems": 1, "items": _SOME_IDS},
    ]
}
Prompt = Annotated[Any, PlainValidator(_prompt), WithJsonSchema(_PROMPT_SCHEMA)]


class CompletionBody(Common):
    """Of /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None
    echo: Bool | None = None
    """Whether the prompt comes back before what follows it; with logprobs, scored."""
    best_of: Annotated[Int, Field(ge=1)] | None = None
    """Not more than n."""


class TextPart(Body):
    type: Literal["text"]
    text: Str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Str | Annotated[list[TextPart], Field(min_length=1, max_length=MANY)] | None,
        _or('a string, or a list of {"type": "text", "text": ...}'),
    ] = None
    """Only the assistant's may be null."""
    name: Str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing", "content is needed")
        return self

    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(Common):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MANY)]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    """Goes before max_tokens; where both are null, all that the context holds."""
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None


class TokenizeBody(Body):
    """Of /tokenize."""

    model: Str | None = None
    prompt: Annotated[Str, Field(max_length=MAX_TEXT)]
    add_special_tokens: Bool = True
    """Whether the token that begins a document comes first."""


def _is_none(value: Any) -> bool:
    return value in (None, False, "", [], {}, "none", "auto")


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("tools", "functions", "function_call", "tool_choice", "suffix", "audio", "prediction", "web_search_options"),
        _is_none,
    ),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "prompt_embeds"), _is_none),
    **dict.fromkeys(("best_of_beams", "use_beam_search", "structured_outputs", "prompt_logprobs"), _is_none),
    "response_format": lambda value: value is None or (isinstance(value, dict) and value.get("type") == "text"),
    "modalities": lambda value: value in (None, ["text"]),
    "store": lambda value: value in (None, False),
}
"""Fields that would change the answer, by name, with which values ask for nothing."""

B = TypeVar("B", bound=Body)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def read(cls: type[B], raw: bytes) -> B:
    """A body as it was sent.

    Raises:
        ApiError: it is no JSON, or not what is allowed; the message names the field.
    """
    try:
        data = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error or type(error).__name__}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body is to be a JSON object", code="invalid_json")
    _refuse_unsupported(data)
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"] if part != "[key]")
        text = "it is needed" if first["type"] == "missing" else first["msg"]
        raise ApiError(400, f"{param}: {text}", param=param, code="invalid_value") from None


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    for name, asks_nothing in UNSUPPORTED.items():
        if name in data and not asks_nothing(data[name]):
            raise ApiError(
                400, f"{name}: this server does not support it; leave it out", param=name, code="unsupported_parameter"
            )
    best_of, n = data.get("best_of"), data.get("n") or 1
    if isinstance(best_of, int) and isinstance(n, int) and best_of > n:
        raise ApiError(
            400,
            f"best_of={best_of}: at most n={n} are made; leave it out",
            param="best_of",
            code="unsupported_parameter",
        )
    for i, message in enumerate(data["messages"] if isinstance(data.get("messages"), list) else ()):
        if isinstance(message, dict) and not _is_none(message.get("tool_calls")):
            param = f"messages.{i}.tool_calls"
            raise ApiError(400, f"{param}: tools are not supported", param=param, code="unsupported_parameter")

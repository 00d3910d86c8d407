"""What clients may send: OpenAI's fields, and ours.

A field that means something and is not there is refused (`UNSUPPORTED`), one that does no harm is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from alcoda.errors import did_you_mean
from alcoda.serve.errors import ApiError

MAX_SEED = (1 << 63) - 1
MANY = 4096
"""Of messages, parts, biases."""
MAX_TEXT = 1 << 16
"""Characters of a text that is only to be tokenised."""


def _whole(value: Any) -> Any:
    """2.0 is a whole number in JSON. None is longer than what reads it can count to, or a message can quote."""
    found = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(found, int) and not -MAX_SEED - 1 <= found <= MAX_SEED:
        least = found < 0
        raise PydanticCustomError(
            "size",
            "Input should be {side} than or equal to {bound}",
            {"side": "greater" if least else "less", "bound": -MAX_SEED - 1 if least else MAX_SEED},
        )
    return found


def _or(allowed: str, whole: type[BaseModel] | None = None) -> WrapValidator:
    """One message for a field of several forms. An object is read as ``whole``, whose errors name the field in it."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if whole is not None and isinstance(value, dict):
            return whole.model_validate(value)
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("form", "{allowed}", {"allowed": allowed}) from None

    return WrapValidator(check)


Int = Annotated[int, BeforeValidator(_whole), Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Str = Annotated[str, Field(strict=True)]
Name = Annotated[Str, Field(max_length=256)]
"""Of what a server has few of: near ones are looked for."""


class Body(BaseModel):
    """A part of what is sent."""

    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class StreamOptions(Body):
    include_usage: Bool | None = None
    """Whether one more event at the end has the usage."""


class LoopBounds(Body):
    """Between which loops the exit decides."""

    model_config = ConfigDict(extra="forbid")
    min: Annotated[Int, Field(ge=1)] | None = None
    max: Annotated[Int, Field(ge=1)] | None = None


Threshold = Annotated[Float, Field(ge=0)]
THRESHOLDS = "a number of at least 0, or a list of one for each loop"


class ExitChoice(Body):
    """An exit rule, docs/design/axes/exit.md."""

    model_config = ConfigDict(extra="forbid")
    rule: Name
    threshold: Annotated[Threshold | Annotated[list[Threshold], Field(max_length=1000)] | None, _or(THRESHOLDS)] = None


Some = Annotated[Str, Field(min_length=1, max_length=1000)]
Stop = Annotated[
    Some | Annotated[list[Some], Field(max_length=4)] | None,
    _or("a string of 1 to 1,000 characters, or a list of at most 4 of them"),
]
Bias = Annotated[Float, Field(ge=-100, le=100)]


class Common(Body):
    """Fields of both endpoints."""

    model: Name | None = None
    """NAME, NAME:TIER; null: the server's."""
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=0)] | None = None
    """Another name of max_tokens, which goes first. Where both are null: 16 tokens; of a chat all that the context
    holds."""
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
    best_of: Annotated[Int, Field(ge=1)] | None = None
    """Not more than n."""
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
        Annotated[Int, Field(ge=1)] | LoopBounds | None,
        _or('a whole number from 1, or {"min": a, "max": b}', LoopBounds),
    ] = None
    """An extension: loops of every token; or between how many an exit decides."""
    exit: Annotated[
        Name | ExitChoice | None,
        _or('the name of a tier, "none", or {"rule": name, "threshold": number or list}', ExitChoice),
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
    return isinstance(value, list) and bool(value) and all(type(one) is int and 0 <= one <= MAX_SEED for one in value)


def _prompt(value: Any) -> str | list[str] | list[int] | list[list[int]]:
    several = isinstance(value, list) and bool(value)
    is_texts = several and all(isinstance(one, str) for one in value)
    if isinstance(value, str) or is_texts or _is_ids(value) or (several and all(map(_is_ids, value))):
        return value
    wrong = _wrong_id(value)
    form = "a string, a list of strings, a list of token ids, or a list of such lists; none of them an empty list"
    raise PydanticCustomError("form", "{text}", {"text": form if wrong is None else f"{form}; {wrong}"})


def _wrong_id(value: Any) -> str | None:
    """Which of the ids of a prompt is none, where most likely they were meant to be ids."""
    for p, ids in enumerate([value, *value] if isinstance(value, list) else []):
        if isinstance(ids, list) and any(isinstance(one, int | float) for one in ids):
            for i, one in enumerate(ids):
                if not _is_ids([one]):
                    of = f" of prompt {p}" if p else ""
                    return f"ids are whole numbers from 0 to {MAX_SEED}, and number {i + 1}{of} is {_shown(one)}"
    return None


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


class TextPart(Body):
    type: Literal["text"]
    text: Str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Str | Annotated[list[TextPart], Field(min_length=1, max_length=MANY)] | None,
        _or('a string, or a list of {"type": "text", "text": ...}'),
        Field(validate_default=True),
    ] = None
    """Only the assistant's may be null."""
    name: Str | None = None

    @field_validator("content")
    @classmethod
    def _says(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "it is needed")
        return value

    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(Common):
    """Of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MANY)]
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=20)] | None = None


class TokenizeBody(Body):
    """Of /tokenize."""

    model: Name | None = None
    prompt: Annotated[Str, Field(max_length=MAX_TEXT)]
    add_special_tokens: Bool | None = None
    """True where null: whether the token that begins a document comes first."""


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
JSON = "application/json"
CLOSED: dict[str, type[Body]] = {"loops": LoopBounds, "exit": ExitChoice}
"""Fields of ours whose own fields are these and no others."""
WORDS = {
    "missing": "it is needed",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "Input should be an object"),
}
"""What pydantic calls otherwise, by the type of the error."""
MOST_SHOWN = 40
"""Characters of a value that a message quotes."""


async def check_type(request: Request) -> None:
    """ApiError (415) where a body is not said to be JSON: a page of another origin may send any other without the
    browser asking first."""
    sent = request.headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() != JSON:
        raise ApiError(
            415,
            f"the header Content-Type is {sent[:80]!r}: a body is taken as {JSON} only",
            code="unsupported_media_type",
        )


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
        why = "a number has too many digits" if "digits" in str(error) else error or type(error).__name__
        raise ApiError(400, f"the body is no JSON: {why}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body is to be a JSON object", code="invalid_json")
    _refuse_unsupported(data)
    try:
        body = cls.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"] if part != "[key]")
        text, got = WORDS.get(first["type"], first["msg"]), f" (got {_shown(first['input'])})"
        if first["type"] == "extra_forbidden":
            field, name = str(first["loc"][0]), str(first["loc"][-1])
            text, got = f"there is no such field{did_you_mean(name, CLOSED[field].model_fields)}", ""
        elif first["type"] == "missing":
            got = ""
        raise ApiError(400, f"{param}: {text}{got}", param=param, code="invalid_value") from None
    if isinstance(body, Common) and body.best_of is not None and body.best_of > (body.n or 1):
        raise ApiError(
            400,
            f"best_of={body.best_of}: at most n={body.n or 1} are made; leave it out",
            param="best_of",
            code="unsupported_parameter",
        )
    return body


def _shown(value: Any) -> str:
    """What was sent, for a message: not all of what is long."""
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return json.dumps(value[:MOST_SHOWN]) + ("..." if len(value) > MOST_SHOWN else "")
    return json.dumps(value)[:MOST_SHOWN]


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    for name, asks_nothing in UNSUPPORTED.items():
        if name in data and not asks_nothing(data[name]):
            raise ApiError(
                400, f"{name}: this server does not support it; leave it out", param=name, code="unsupported_parameter"
            )
    for i, message in enumerate(data["messages"] if isinstance(data.get("messages"), list) else ()):
        if isinstance(message, dict) and not _is_none(message.get("tool_calls")):
            param = f"messages.{i}.tool_calls"
            raise ApiError(400, f"{param}: tools are not supported", param=param, code="unsupported_parameter")

"""A body as requests of the engine: what runs beside the event loop before anything is asked of the model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from alcoda.errors import UsageError
from alcoda.serve.errors import ApiError
from alcoda.serve.protocol import ChatBody, Common, CompletionBody
from alcoda.serve.tiers import Depth

if TYPE_CHECKING:
    from alcoda.engine.llm import LM
    from alcoda.engine.request import Request
    from alcoda.serve.worker import Worker

COMPLETION_TOKENS = 16
"""Of a completion where nothing is said, as OpenAI's."""


@dataclass(frozen=True)
class Plan:
    """What is done for one HTTP request.

    Attributes:
        is_chat: whose form the answer has.
        model: as it was asked for.
        requests: one a prompt; None: nothing is to follow it (max_tokens 0).
        prompts: token ids of each.
        like: a request of the same depth, of no prompt.
        n: completions of each prompt.
        logprobs: likeliest tokens told of beside each; None: no log-probabilities.
        echo: whether the prompts come back.
        returns_loops, returns_steps: whether each token's loops, and what each did, are told.
        timeout_s: after which it is given up.
    """

    is_chat: bool
    model: str
    depth: Depth
    requests: tuple[Request | None, ...]
    prompts: tuple[tuple[int, ...], ...]
    like: Request
    n: int
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    returns_loops: bool
    returns_steps: bool
    timeout_s: float | None

    @property
    def n_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def scores(self) -> bool:
        """Whether prompts are scored."""
        return self.echo and self.logprobs is not None


def n_choices(body: Common, worker: Worker) -> int:
    """Completions of a body; ApiError where they are more than one request may have."""
    settings, n = worker.settings, body.n or 1
    if n > settings.max_n:
        raise ApiError(400, f"n={n}: this server makes {settings.max_n} at most", param="n")
    prompts = 1
    if isinstance(body, CompletionBody) and isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
        prompts = len(body.prompt)
    if prompts > settings.max_prompts:
        raise ApiError(
            400, f"prompt: {prompts} of them; this server takes {settings.max_prompts} at most", param="prompt"
        )
    return n * prompts


def make_plan(body: CompletionBody | ChatBody, worker: Worker, depth: Depth) -> Plan:
    """The plan of a body. ApiError (400) where it cannot be done."""
    try:
        return _make(body, worker, depth)
    except UsageError as error:
        from alcoda.engine.llm import PromptError

        code = "context_length_exceeded" if isinstance(error, PromptError) else None
        raise ApiError(400, str(error), param=_param(str(error), body), code=code) from None


def _make(body: CompletionBody | ChatBody, worker: Worker, depth: Depth) -> Plan:
    lm = worker.lm
    if isinstance(body, ChatBody):
        # Together: many that are short are as long as one that is not. A message without text counts too.
        _check_size("\n".join(message.text() for message in body.messages), lm, "messages")
        prompts: list[tuple[int, ...]] = [worker.chat.prompt(body.messages)]
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: set logprobs to true too", param="top_logprobs")
        echo, stops, ends = False, worker.chat.stops, worker.chat.stop_ids
    else:
        given = _prompts(body.prompt)
        for one in given:
            if isinstance(one, str):
                _check_size(one, lm, "prompt")
        prompts = [lm.prompt_ids(one) for one in given]
        logprobs, stops, ends = body.logprobs, (), frozenset()
        echo = bool(body.echo)
    asked, named = _asked(body)
    if asked == 0 and not echo:
        raise ApiError(400, f"{named}=0: without echo nothing is asked for", param=named)
    if echo and logprobs is not None and lm.decodes_only:
        raise ApiError(
            400,
            "logprobs: with echo, prompts are scored, which reads weights that this server does not keep (it decodes "
            "only); leave one of the two out",
            param="logprobs",
        )
    for ids in prompts:
        _check_fits(ids, asked, named, worker, isinstance(body, ChatBody))
    how = _how(body, stops, logprobs) | depth.how
    assert worker.service is not None
    engine = worker.service.background.engine
    for ids in prompts:
        engine.check_prompt(ids)
    like = lm.request((0,), max_tokens=1, **how)
    requests = [
        None if asked == 0 else lm.request(ids, max_tokens=asked or worker.context - len(ids), **how) for ids in prompts
    ]
    if ends and not body.ignore_eos:
        requests = [one and replace(one, stop_ids=one.stop_ids | ends) for one in requests]
    for request in requests:
        if request is not None:
            engine.check(request)
    return Plan(
        isinstance(body, ChatBody),
        body.model or worker.catalogue.name,
        depth,
        tuple(requests),
        tuple(prompts),
        like,
        body.n or 1,
        logprobs,
        echo,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        bool(body.return_loops or body.return_trajectory),
        bool(body.return_trajectory),
        _least(body.timeout, worker.settings.deadline_s),
    )


def _param(message: str, body: Common) -> str:
    """The field that a message of the engine is about: it begins with the name, or is about the prompt."""
    found = re.match(r"[a-z_]+(\.[a-z_]+)?", message)
    name = found[0] if found else ""
    is_field = name.partition(".")[0] in type(body).model_fields
    return name if is_field else "messages" if isinstance(body, ChatBody) else "prompt"


def _asked(body: Common) -> tuple[int | None, str | None]:
    """Tokens that are to follow (None: as many as the context holds), and the field that says so, if one does."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (asked := getattr(body, name)) is not None:
            return asked, name
    return (None if isinstance(body, ChatBody) else COMPLETION_TOKENS), None


def _check_size(text: str, lm: LM, name: str) -> None:
    """ApiError where a text cannot fit, whatever its tokens are: it need not be encoded to know that."""
    tokenizer, seq_len = lm.tokenizer, lm.model.config.seq_len
    # A tokenizer that changes texts may shorten them.
    most = seq_len * int(tokenizer.token_bytes_V.max()) * (1 if tokenizer.exact else 4)
    if len(text) > most:
        why = f"{name}: a text of {len(text)} characters, and this model's context holds {seq_len} tokens: shorten it"
        raise ApiError(400, why, param=name, code="context_length_exceeded")


def _how(body: Common, stops: Sequence[str], logprobs: int | None) -> dict[str, Any]:
    from alcoda.engine.text import MAX_STOPS

    asked = [body.stop] if isinstance(body.stop, str) else body.stop or []
    # Of what no seed was given for, none is told: the next such request draws otherwise.
    seed = secrets.randbits(63) if body.seed is None else body.seed % (1 << 63)
    named = {
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
    }
    return {name: value for name, value in named.items() if value is not None} | {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": seed,
        "n": body.n or 1,
        "stop": [*asked, *stops][:MAX_STOPS] or None,  # the template's own as far as there is room
        "ignore_eot": bool(body.ignore_eos),
        "logprobs": logprobs,
        "trace": bool(body.return_trajectory),
    }


def _prompts(prompt: Any) -> list[Any]:
    """A string, ids, or a list of either, as a list."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _check_fits(ids: Sequence[int], asked: int | None, named: str | None, worker: Worker, is_chat: bool) -> None:
    """ApiError where a prompt and what is to follow (``named`` says so) are longer than the context."""
    seq_len = worker.lm.model.config.seq_len
    context = worker.context if asked != 0 else seq_len  # what is only scored leaves no keys in the cache
    whose = "this model's context" if context == seq_len else "this server's cache"
    name = "messages" if is_chat else "prompt"
    least, room = 1 if asked is None else asked, context - len(ids)
    if least <= room:
        return
    what = f"{len(ids)} tokens of {name} and {least} to follow"
    if room < 1 or asked is None:
        way, param = f"shorten {name}", name
    elif named is None:
        way, param = f"shorten {name}, or set max_tokens to {room} or less", name
    else:
        way, param = f"shorten {name}, or lower {named} to {room} or less", named
    raise ApiError(400, f"{what}, and {whose} holds {context}: {way}", param=param, code="context_length_exceeded")


def _least(*numbers: float | None) -> float | None:
    return min((number for number in numbers if number is not None), default=None)

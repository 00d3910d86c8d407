"""Do langchain-openai and litellm get along with `alcoda serve`? The last line is JSON.

    make clients && .venv-clients/bin/python benchmarks/serve_clients.py

Both talk to ``alcoda serve mini``, started here with a key, by their own ways: invoke, stream, a list of messages,
errors. What they make of an answer is held against what the server says to a plain client. Exit code 1 where anything
differs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import httpx
from serve_process import serving

KEY = "sesame"
MESSAGES = [{"role": "user", "content": "Once upon a time there was a fox"}]
MAX_TOKENS = 12


def plain(url: str, path: str, **body: Any) -> dict[str, Any]:
    """An answer as it is."""
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, trust_env=False, timeout=60)
    answer.raise_for_status()
    return answer.json()


def langchain(url: str, model: str) -> dict[str, Any]:
    """`ChatOpenAI` and `OpenAI` of langchain-openai."""
    from langchain_openai import ChatOpenAI, OpenAI

    known = plain(url, "chat/completions", model=model, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0)
    want = known["choices"][0]["message"]["content"]
    how: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": KEY, "temperature": 0}
    chat = ChatOpenAI(model=model, max_completion_tokens=MAX_TOKENS, stream_usage=True, **how)
    one = chat.invoke(MESSAGES)
    pieces = list(chat.stream(MESSAGES))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    text = OpenAI(model=model, max_tokens=MAX_TOKENS, **how).invoke("Once upon a time")
    bare = plain(url, "completions", model=model, prompt="Once upon a time", max_tokens=MAX_TOKENS, temperature=0)
    base = model.partition(":")[0]  # a tier has a depth of its own
    fixed = ChatOpenAI(model=base, max_completion_tokens=MAX_TOKENS, extra_body={"loops": 2}, **how).invoke(MESSAGES)
    return {
        "invoke": one.content == want,
        "usage": one.usage_metadata["output_tokens"] == known["usage"]["completion_tokens"],
        "stream": whole.content == want and len(pieces) > 2,
        "stream_usage": whole.usage_metadata == one.usage_metadata,
        "batch": [x.content for x in chat.batch([MESSAGES, MESSAGES])] == [want, want],
        "completions": text == bare["choices"][0]["text"],
        "extra_body": fixed.response_metadata["token_usage"]["completion_tokens_details"]["loops"] == 2 * MAX_TOKENS,
        "unknown_model": _raises("NotFoundError", lambda: ChatOpenAI(model="nobody", **how).invoke(MESSAGES)),
        "tools": _raises(
            "BadRequestError",
            lambda: chat.bind_tools([{"name": "f", "description": "d", "parameters": {}}]).invoke("a"),
        ),
        "wrong_key": _raises(
            "AuthenticationError", lambda: ChatOpenAI(model=model, **(how | {"api_key": "no"})).invoke(MESSAGES)
        ),
    }


def through_litellm(url: str, model: str) -> dict[str, Any]:
    """`completion`, plain and streamed, its own rebuilding of a stream, and its text completions."""
    import litellm

    litellm.suppress_debug_info = True
    known = plain(url, "chat/completions", model=model, messages=MESSAGES, max_tokens=MAX_TOKENS, temperature=0)
    want = known["choices"][0]["message"]["content"]
    how: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": KEY, "max_tokens": MAX_TOKENS, "temperature": 0}
    name = f"openai/{model}"
    one = litellm.completion(model=name, messages=MESSAGES, **how)
    chunks = list(
        litellm.completion(model=name, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **how)
    )
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Once upon a time", **how)
    bare = plain(url, "completions", model=model, prompt="Once upon a time", max_tokens=MAX_TOKENS, temperature=0)
    return {
        "completion": one.choices[0].message.content == want,
        "usage": one.usage.completion_tokens == known["usage"]["completion_tokens"],
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == want,
        "stream_chunk_builder": built.choices[0].message.content == want,
        "finish": built.choices[0].finish_reason
        == one.choices[0].finish_reason
        == known["choices"][0]["finish_reason"],
        "stream_usage": built.usage.completion_tokens == one.usage.completion_tokens,
        "text_completion": text.choices[0].text == bare["choices"][0]["text"],
        "unknown_model": _raises(
            "NotFoundError", lambda: litellm.completion(model="openai/nobody", messages=MESSAGES, **how)
        ),
    }


def _raises(name: str, act: Callable[[], Any]) -> bool | str:
    """True where it raises an error of this name; else the name of the one that it raises, or False."""
    try:
        act()
    except Exception as error:
        return any(kind.__name__ == name for kind in type(error).__mro__) or type(error).__name__
    return False


def main() -> None:
    os.environ |= {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    found: dict[str, Any] = {}
    with serving("mini", "--api-key", KEY) as served:
        model = served.said["models"][0].partition(":")[0]
        for name, check in (("langchain-openai", langchain), ("litellm", through_litellm)):
            found[name] = check(served.url, f"{model}:balanced")
            wrong = [what for what, right in found[name].items() if right is not True]
            print(f"{name}: {'all right' if not wrong else f'WRONG: {wrong}'}", flush=True)
        found["log"] = served.complaints()
    print(json.dumps(found))
    sys.exit(0 if not found["log"] and all(x is True for k in found if k != "log" for x in found[k].values()) else 1)


if __name__ == "__main__":
    main()

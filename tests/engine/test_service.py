"""A model behind asyncio: prompts that come at one time share an engine, and get what each gets alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import alcoda
from alcoda.engine.llm import LM
from alcoda.engine.options import Options
from alcoda.engine.service import Service
from alcoda.errors import RunError, UsageError

PROMPTS = ["The fox", "Once upon", "n4>n9;", "A"]
HOW = {"max_tokens": 12, "temperature": 0.8, "seed": 3}


@pytest.fixture(scope="module")
def lm() -> LM:
    return alcoda.load("mini", dtype="float32")


@pytest.fixture
def service(lm: LM) -> Iterator[Service]:
    """Launches of one width, so that texts are those of each alone."""
    with lm.service(Options(width=4, places=4, deterministic=True)) as service:
        yield service
    assert not service.background.is_alive
    service.background.engine.check_idle()


def alone(lm: LM, prompt: str, **how: object) -> str:
    return "".join(lm.stream(prompt, engine=Options(width=4, deterministic=True), **how))


async def said(service: Service, prompt: str) -> list[str]:
    return [piece async for piece in service.stream(prompt, **HOW)]


def test_streams_that_run_together_are_those_of_each_alone(lm: LM, service: Service) -> None:
    async def together() -> list[list[str]]:
        goes = threading.Event()
        service.background.call(goes.wait)
        asked = [asyncio.ensure_future(said(service, prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0)  # each has been asked
        goes.set()
        return list(await asyncio.gather(*asked))

    found = asyncio.run(together())
    assert ["".join(pieces) for pieces in found] == [alone(lm, prompt, **HOW) for prompt in PROMPTS]
    rows, launches = service.background.engine.stats.rows["core"], service.background.engine.stats.launches["core"]
    assert rows > 1.5 * launches, "they shared launches"


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: [np.int64(one) for one in ids]])
def test_ids_of_a_prompt(lm: LM, kind: Callable[[list[int]], Any]) -> None:
    ids = list(lm.prompt_ids("The fox"))
    assert lm.request(kind(ids)).prompt == tuple(ids)
    assert lm.generate([kind(ids)], max_tokens=6) == [lm.generate("The fox", max_tokens=6)]


@pytest.mark.parametrize("prompt", [[5, 6.9], [5.0], b"The", 5, None, {5}, [[5]], np.array([5.0]), torch.ones(2, 2)])
def test_what_is_no_prompt(lm: LM, prompt: Any) -> None:
    with pytest.raises(UsageError, match=r"^prompt .*: a text, or the ids of its tokens, which are whole numbers$"):
        lm.request(prompt)


def test_completions_of_a_prompt(lm: LM, service: Service) -> None:
    found = asyncio.run(service.generate(PROMPTS[0], n=3, **HOW))
    assert found[0].text == alone(lm, PROMPTS[0], **HOW) and len({one.text for one in found}) == 3
    assert [one.finish for one in found] == ["length"] * 3


def test_a_caller_that_leaves_takes_its_text_along(service: Service) -> None:
    async def leaves() -> None:
        pieces = service.stream(PROMPTS[0], max_tokens=60)
        await anext(pieces)
        await pieces.aclose()
        assert (await service.generate("A", max_tokens=2))[0].finish == "length", "the others go on"

    asyncio.run(leaves())


@pytest.mark.parametrize(("how", "message"), [({"n": 2}, "n=2 in a stream"), ({"max_tokens": 0}, "max_tokens")])
def test_what_cannot_be_is_said_at_once(service: Service, how: dict[str, int], message: str) -> None:
    async def asks() -> None:
        async for _ in service.stream("A", **how):
            pass

    with pytest.raises(UsageError, match=message):
        asyncio.run(asks())


def test_a_stream_that_is_stopped_is_no_whole_text(lm: LM) -> None:
    async def read() -> str:
        text = ""
        with lm.service() as service:
            async for piece in service.stream("The fox", max_tokens=100, ignore_eot=True):
                text += piece
                service.background.stop()
        return text

    with pytest.raises(RunError, match="stopped before the text had ended"):
        asyncio.run(read())

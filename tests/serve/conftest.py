"""One server for tests that only ask, and the openai client for it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import openai
import pytest
import torch
from serving import calls as calls
from serving import serving, tiny

from alcoda.engine.llm import LM
from alcoda.serve.server import Server

if find_spec("playwright") is not None:
    from page_browser import browser, page_url, watched  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Sums are taken in one order then."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LM:
    return tiny(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def server(lm: LM) -> Iterator[Server]:
    with serving(lm, {"deterministic": True}) as made:
        yield made


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made

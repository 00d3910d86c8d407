"""Requests whose answers are known: what the engine alone makes of them, token by token."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as the command line does

import alcoda
from alcoda.engine.options import Options
from alcoda.serve.load.prompts import BUILT_IN

TIERS = ("fast", "balanced", "exact")
LENGTHS = (6, 24)


@dataclass(frozen=True)
class Known:
    """A request of one completion, and its answer.

    Attributes:
        body: of the request, without ``stream``.
        text: of the answer.
        ids, loops: of its tokens.
        finish: length or stop.
        prompt_tokens: as the engine reads them.
    """

    body: dict[str, Any]
    text: str
    ids: tuple[int, ...] = field(repr=False)
    loops: tuple[int, ...] = field(repr=False)
    finish: str
    prompt_tokens: int


def known(
    model: str, name: str, width: int, prompts: Iterable[str] = BUILT_IN, lengths: Iterable[int] = LENGTHS
) -> list[Known]:
    """Greedy and sampled requests at every tier, each decoded alone, in launches as wide as the server's, padded
    (deterministic): there a request's neighbours change no bit of it.

    Args:
        model: what `alcoda.load` takes.
        name: of it at the server.
        width: of its launches.
    """
    lm = alcoda.load(model, device="cpu")
    options = Options(width, deterministic=True)
    found = []
    for i, prompt in enumerate(prompts):
        for j, tier in enumerate(TIERS):
            for n in lengths:
                seed = 100 * i + n
                how: dict[str, Any] = {"temperature": 0.9, "seed": seed} if (i + j) % 2 else {"temperature": 0.0}
                # Each prompt ends in a number of its own, so that no two requests are alike.
                own = f"{prompt} {10 * i + j}"
                one = lm.generate(own, exit=tier, max_tokens=n, ignore_eot=True, details=True, engine=options, **how)
                body = {"model": f"{name}:{tier}", "prompt": own, "max_tokens": n, "ignore_eos": True, **how}
                ids = tuple(token.token for token in one.tokens)
                loops = tuple(token.loops for token in one.tokens)
                found.append(Known(body, one.text, ids, loops, one.finish, one.prompt_tokens))
    return found

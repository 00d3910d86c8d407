"""Prompts scored as `alcoda harness` scores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alcoda.downstream.score import TokenScore, score_tokens

if TYPE_CHECKING:
    from alcoda.engine.llm import LM
    from alcoda.serve.plan import Plan


def score_prompt(lm: LM, ids: tuple[int, ...], plan: Plan) -> list[TokenScore]:
    """Each token of a prompt after the first, at the depth of the plan. In the engine's thread."""
    like = plan.like
    loops = lm.n_loops if like.loops is None else like.loops
    return score_tokens(lm.loaded, ids, loops, like.test, plan.logprobs or 0)

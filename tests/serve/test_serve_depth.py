"""Depth as a dial: tiers as models, fixed loops, rules, bounds, and what is told of each token."""

from __future__ import annotations

from typing import Any

import pytest
from serving import ask, metric, serving, web

from alcoda.engine.llm import LM
from alcoda.engine.options import Options
from alcoda.serve.server import Server

ENGINE = Options(width=4, deterministic=True)


@pytest.mark.parametrize(
    ("body", "how", "tier"),
    [
        ({}, {"exit": "balanced"}, "balanced"),
        ({"model": "tiny:fast"}, {"exit": "fast"}, "fast"),
        ({"exit": "fast"}, {"exit": "fast"}, "fast"),
        ({"model": "tiny:exact"}, {"exit": "exact"}, "exact"),
        ({"exit": "none"}, {}, None),
        ({"loops": 2}, {"loops": 2}, None),
        ({"exit": "none", "loops": 3}, {"loops": 3}, None),
        ({"exit": "none", "loops": {"max": 2}}, {"loops": 2}, None),
        ({"exit": {"rule": "state", "threshold": 0.6}}, {"exit": "state", "threshold": 0.6}, None),
        ({"exit": {"rule": "kl", "threshold": [0, 1, 1, 1]}}, {"exit": "kl", "threshold": (0, 1, 1, 1)}, None),
        ({"exit": {"rule": "argmax_stable", "threshold": 1}}, {"exit": "argmax_stable:1"}, None),
        ({"exit": {"rule": "fixed", "threshold": 2}}, {"exit": "fixed:2"}, None),
        ({"exit": {"rule": "fixed", "threshold": 4}, "loops": {"max": 2}}, {"exit": "fixed:2"}, None),
        ({"exit": {"rule": "fixed", "threshold": 1}, "loops": {"min": 3}}, {"exit": "fixed:3"}, None),
        (
            {"exit": {"rule": "kl", "threshold": [0, 1, 1, 1]}, "loops": {"max": 2}},
            {"exit": "kl", "threshold": (0, 1, 1, 1), "max_loops": 2},
            None,
        ),
        (
            {"exit": {"rule": "state", "threshold": 0.6}, "loops": 2},
            {"exit": "state", "threshold": 0.6, "loops": 2},
            None,
        ),
        ({"model": "tiny:fast", "loops": {"min": 3}}, {"exit": "fast", "min_loops": 3}, "fast"),
        ({"loops": {"min": 2, "max": 3}}, {"exit": "balanced", "min_loops": 2, "max_loops": 3}, "balanced"),
    ],
)
def test_depth_is_as_asked(server: Server, lm: LM, body: dict[str, Any], how: dict[str, Any], tier: str | None) -> None:
    found = ask(server, **body, max_tokens=20, return_loops=True)
    expected = lm.generate("What", details=True, engine=ENGINE, max_tokens=20, **how)
    (choice,) = found["choices"]
    assert choice["text"] == expected.text
    assert [one["loops"] for one in choice["alcoda"]["tokens"]] == [token.loops for token in expected.tokens]
    assert [one["id"] for one in choice["alcoda"]["tokens"]] == [token.token for token in expected.tokens]
    assert found["alcoda"]["tier"] == choice["alcoda"]["tier"] == tier
    details = found["usage"]["completion_tokens_details"]
    assert details["loops"] == sum(token.loops for token in expected.tokens)
    assert details["full_depth_loops"] == 20 * lm.n_loops
    assert found["alcoda"]["mean_loops"] == choice["alcoda"]["mean_loops"] == details["loops"] / 20


def test_a_rule_is_told_as_it_was_asked(server: Server) -> None:
    for threshold, exit in ((3.0, "fixed:3"), (2, "fixed:2")):
        assert ask(server, exit={"rule": "fixed", "threshold": threshold})["alcoda"]["exit"] == exit
    assert ask(server, exit={"rule": "state", "threshold": 0.125})["alcoda"]["exit"] == "state:0.125"


def test_bounds_hold(server: Server) -> None:
    found = ask(server, model="tiny:fast", loops={"min": 2, "max": 3}, max_tokens=30, return_loops=True)
    loops = [one["loops"] for one in found["choices"][0]["alcoda"]["tokens"]]
    assert set(loops) == {2, 3} and found["alcoda"]["max_loops"] == 3


def test_a_trajectory(server: Server, lm: LM) -> None:
    found = ask(server, return_trajectory=True, max_tokens=6)["choices"][0]["alcoda"]["tokens"]
    expected = lm.generate("What", trace=True, engine=ENGINE, max_tokens=6, exit="balanced")
    for one, token in zip(found[1:], expected.tokens[1:], strict=True):
        assert len(one["steps"]) == one["loops"] == token.loops
        assert [step["state_change"] for step in one["steps"]] == [step.state_change for step in token.steps]
        assert one["steps"][0]["kl"] is None and all(step["kl"] >= 0 for step in one["steps"][1:])
        assert all(len(step["top"]) >= 3 and isinstance(step["top"][0][0], str) for step in one["steps"])


def test_nothing_is_told_that_was_not_asked(server: Server) -> None:
    found = ask(server)
    assert "alcoda" not in found["choices"][0] and found["choices"][0]["logprobs"] is None


def test_more_loops_than_the_model_has(lm: LM) -> None:
    with serving(lm, loops=6) as made:
        found = ask(made, loops=6, return_loops=True)
        assert {one["loops"] for one in found["choices"][0]["alcoda"]["tokens"]} == {6}
        details = found["usage"]["completion_tokens_details"]
        assert details["full_depth_loops"] == details["loops"] == 6 * found["usage"]["completion_tokens"]
        # The model's own depth is that of its tiers; beyond it nothing is calibrated.
        body = {"prompt": "What", "loops": {"max": 6}, "exit": "balanced"}
        refused = web.post(made.url + "/v1/completions", json=body)
        assert refused.status_code == 400
        said = refused.json()["error"]["message"]
        assert "4 loops run at most at exit 'balanced'; for up to 6 ask for a rule" in said


def test_a_run_without_tiers(tmp_path: Any) -> None:
    from serving import tiny

    lm = tiny(tmp_path)
    lm.loaded.run.exits_json.unlink()
    with serving(lm) as made:
        assert made.described()["models"] == ["tiny", "tiny:exact"]
        assert ask(made)["alcoda"] == {"tier": None, "exit": "none", "mean_loops": 4.0, "max_loops": 4}
        assert ask(made, model="tiny:exact", loops={"max": 2})["alcoda"]["max_loops"] == 2


def test_tiers_of_other_weights_are_not_used(tmp_path: Any) -> None:
    from loaded import loaded
    from serving import tiny

    lm = tiny(tmp_path)
    lm.model.load_state_dict(loaded(seed=3, seq_len=96).model.state_dict())
    with serving(lm) as made:
        assert made.described()["models"] == ["tiny", "tiny:exact"]
        (note,) = made.worker.notes()
        assert note.startswith("no tiers: ") and "calibrated with weights other than" in note


def test_loops_are_counted(lm: LM) -> None:
    with serving(lm) as made:
        found = [ask(made, max_tokens=10, **body) for body in ({}, {"model": "tiny:fast"}, {"loops": 4})]
        spent = sum(one["usage"]["completion_tokens_details"]["loops"] for one in found)
        assert metric(made, "alcoda_token_loops_total") == spent
        assert metric(made, "alcoda_token_full_depth_loops_total") == 3 * 10 * 4
        assert metric(made, "alcoda_generated_tokens_total") == metric(made, "alcoda_engine_tokens_total") == 30
        assert metric(made, "alcoda_loops_per_token_count") == 30
        assert metric(made, "alcoda_loops_per_token_sum") == spent
        assert metric(made, 'alcoda_tier_requests_total{tier="fast"}') == 1
        assert metric(made, 'alcoda_completions_total{finish="length"}') == 3
        assert metric(made, "alcoda_time_to_first_token_seconds_count") == 3
        assert metric(made, "alcoda_queue_seconds_count") == 3
        assert metric(made, "alcoda_running") == metric(made, "alcoda_waiting") == 0
        assert metric(made, "alcoda_cache_tokens_used") == 0

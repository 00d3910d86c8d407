"""Combinations that make no sense are refused, with a message that names the way out."""

from __future__ import annotations

from typing import Any

import pytest

from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"d_model": 100, "n_heads": 3}, r"n_heads=3 must divide d_model=100: for example n_heads=[24]; or set d_head"),
        ({"d_model": 8, "n_heads": 16}, r"n_heads=16 must divide d_model=8: for example n_heads=8"),
        (
            {"n_heads": 4, "block": {"attention": {"kind": "gqa", "n_kv_heads": 3}}},
            r"attention.n_kv_heads=3 must divide n_heads=4: one of \[1, 2, 4\]",
        ),
        ({"block": {"attention": "gqa"}}, r"n_kv_heads: field required"),
        ({"d_model": 20, "n_heads": 4}, r"position rope needs an even d_head, got 5: change d_model / n_heads, or set"),
        ({"d_head": 7}, r"position rope needs an even d_head, got 7"),
        (
            {"n_prelude": 0, "n_core": 0, "n_coda": 0, "n_loops": 1},
            r"n_prelude, n_core and n_coda are all 0: a model needs at least one block",
        ),
        ({"n_core": 0}, r"n_core=0 has nothing to loop: set n_loops to 1 \(got 8\), or n_core to 1 or more"),
        (
            {"n_core": 0, "n_loops": 1, "update": "gate"},
            r"n_core=0 has no loop for update 'gate' to act in: remove it \(the null choice is 'overwrite'\), or",
        ),
        (
            {"n_core": 0, "n_loops": 1, "inject": "concat"},
            r"no loop for inject 'concat' to act in.*null choice is 'none'",
        ),
        (
            {"n_core": 0, "n_loops": 1, "state_init": "zeros"},
            r"no loop for state_init 'zeros'.*null choice is 'anchor'",
        ),
        ({"n_core": 0, "n_loops": 1, "loop_norm": "every_loop"}, r"no loop for loop_norm 'every_loop'"),
        (
            {"state_init": "noise"},
            r"state_init 'noise' with inject 'none', carry 'none' and keys 'per_loop': the tokens cannot "
            r"reach the loop. Set inject to add or concat",
        ),
        ({"state_init": "zeros"}, r"state_init 'zeros' with inject 'none', .*: the tokens cannot reach the loop"),
        (
            {"final_norm": "shared"},
            r"final_norm 'shared' is the loop norm's weight again: set loop_norm to before_coda or every_loop, or "
            r"final_norm to own",
        ),
        (
            {"block": {"bias": True, "attention": {"kind": "mha", "qk_bias": True}}},
            r"attention.qk_bias is already there with block.bias=true.*remove qk_bias, or set block.bias to false",
        ),
        (
            {"block": {"bias": True, "attention": {"kind": "mha", "v_bias": True}}},
            r"attention.v_bias is already there",
        ),
        (
            {"n_heads": 4, "block": {"bias": True, "attention": {"kind": "gqa", "n_kv_heads": 2, "qk_bias": True}}},
            r"attention.qk_bias is already there",
        ),
        (
            {"d_model": 32, "block": {"value_embed": {"kind": "table", "gate_channels": 33}}},
            r"value_embed.gate_channels=33 is more than d_model=32: .*set it to 32 or less, or gate to false",
        ),
        ({"block": {"window": "pattern"}}, r"tokens: field required"),
        (
            {"block": {"window": {"kind": "pattern", "tokens": 0}}},
            r"tokens: input should be greater than or equal to 1",
        ),
        (
            {"block": {"window": {"kind": "pattern", "tokens": 9, "pattern": "SXL"}}},
            r"pattern: only the letters S \(the window\) and L \(everything\) are known.*\(got 'SXL'\)",
        ),
        (
            {"block": {"window": {"kind": "pattern", "tokens": 9, "pattern": "LL"}}},
            r"pattern: no layer has the window: at least one S is needed, or window none \(got 'LL'\)",
        ),
        (
            {"block": {"window": {"kind": "pattern", "tokens": 9, "pattern": ""}}},
            r"pattern: no layer has the window: at least one S is needed",
        ),
        ({"block": {"sandwich": "branch"}}, r"sandwich: input should be 'none', 'after_add' or 'on_branch'"),
        ({"block": {"attention": {"kind": "mla", "latent": 0}}}, r"latent: input should be greater than or equal to 1"),
        *(
            ({"n_core": 0, "n_loops": 1, field: kind}, rf"no loop for {field} '{kind}' to act in: remove it")
            for field, kind in {
                "carry": "hyper",
                "loop_index": "sinusoidal",
                "keys": "anchor",
                "sharing": "lora",
                "route": "token_choice",
                "exit_gate": "linear",
                "readout_map": "linear",
            }.items()
        ),
        ({"sharing": {"kind": "untied", "rank": 4}}, r"sharing: unknown key 'rank'"),
        ({"sharing": {"kind": "lora", "rank": 0}}, r"rank: input should be greater than or equal to 1"),
        ({"keys": "anchor", "route": "expert_choice"}, r"that drops them: .*Set route.drop_keys to false"),
        (
            {"route": {"kind": "token_choice", "drop_keys": False}},
            r"a token that is out has no key at that depth. Set keys to anchor, or route.drop_keys to true",
        ),
        (
            {"route": "token_choice", "n_loops": 1},
            r"route 'token_choice' with n_loops=1 has no choice: set n_loops to 2",
        ),
        (
            {"update": "lti_delta", "block": {"sandwich": "after_add"}},
            r"its branches cannot be told apart. Set sandwich to none or on_branch, or update to lti",
        ),
        (
            {"keys": {"kind": "anchor", "rope": True}, "position": "learned"},
            r"keys.rope=true without rotary positions: set position to rope, or keys.rope to false",
        ),
        ({"carry": {"kind": "hyper", "states": 1}}, r"states: input should be greater than or equal to 2"),
        ({"loop_index": {"kind": "sinusoidal", "dims": 7}}, r"dims: input should be a multiple of 2"),
        ({"update": {"kind": "lti", "start": 1.0}}, r"start: input should be less than 1"),
        ({"soft_cap": {"kind": "tanh", "cap": 0}}, r"cap: input should be greater than 0"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(ModelConfig, data)


@pytest.mark.parametrize(
    "data",
    [
        {"d_model": 100, "n_heads": 3, "d_head": 32},
        {"d_model": 20, "n_heads": 4, "position": "learned"},
        {"block": {"attention": {"kind": "gqa", "n_kv_heads": 4}}},
        {"n_prelude": 0, "n_coda": 0},
        {"n_core": 0, "n_loops": 1},
        {"n_core": 0, "n_loops": 1, "inject": {"kind": "none"}},
        {"state_init": "noise", "inject": "add"},
        {"final_norm": "shared", "loop_norm": "before_coda"},
        {"block": {"bias": True, "attention": {"kind": "mha", "qk_norm": "before_rope"}}},
        {"block": {"attention": {"kind": "mha", "qk_bias": True}}},
        {"d_model": 32, "block": {"value_embed": {"kind": "table", "gate_channels": 32}}},
        {"d_model": 16, "block": {"value_embed": {"kind": "table", "gate": False}}},
        {"d_model": 8, "n_heads": 4, "block": {"attention": "mla"}},
        {"state_init": "zeros", "carry": "hyper"},
        {"state_init": "noise", "keys": "anchor"},
        {"keys": "anchor", "route": {"kind": "expert_choice", "drop_keys": False}},
        {"update": "lti_delta", "block": {"sandwich": "on_branch"}},
        {"keys": {"kind": "anchor", "rope": True}, "position": "rope"},
        {"final_norm": "shared", "loop_norm": "every_loop", "sharing": "untied", "route": "token_choice"},
    ],
)
def test_its_neighbours_are_taken(data: dict[str, Any]) -> None:
    assert validate(ModelConfig, data).model_dump()


def test_sizes_that_are_left_out_are_filled_in() -> None:
    assert ModelConfig().shape.d_head == 64
    assert ModelConfig(d_head=8).shape.d_head == 8
    assert ModelConfig().shape.d_ff == 704  # 8 * 256 / 3 = 682.7, up to a multiple of 64
    assert ModelConfig(block={"mlp": "gelu"}).shape.d_ff == 1024
    assert ModelConfig(block={"mlp": "relu2"}).shape.d_ff == 1024
    assert ModelConfig(d_ff=10).shape.d_ff == 10


@pytest.mark.parametrize(("n_core", "loops", "message"), [(2, 0, "eval.loops=0: at least 1"), (0, 2, "is dense")])
def test_depths_that_cannot_run(n_core: int, loops: int, message: str) -> None:
    config = ModelConfig(n_core=n_core, n_loops=8 if n_core else 1)
    with pytest.raises(UsageError, match=message):
        config.check_loops(loops, "eval.loops")

"""The engine's benchmark: all modes do the same recorded work, and its figures are what they are called."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import alcoda
from alcoda.bench import ACCEPTANCE, DRAFT_LOOPS
from alcoda.depth.record import Trace
from alcoda.depth.rules import StateChange
from alcoda.depth.watch import Bounds, Kept, Seen, StateTest
from alcoda.engine import bench as bench_module
from alcoda.engine.bench import Spread, bench
from alcoda.engine.decode import decode
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.stats import Stats, Stopwatch, flop_bound
from alcoda.engine.workload import (
    MODES,
    REQUESTS,
    RULE,
    SLICES,
    UNIFORM,
    Decoding,
    Mode,
    Script,
    Timing,
    Work,
    record,
    spread_depths,
    timed,
    timed_in_turn,
)
from alcoda.errors import RunError, UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.norms import RMSNormModule

LOOPS, N_PROMPT, N_NEW, VOCAB = 4, 5, 6, 48
N_READ = N_PROMPT + N_NEW - 1
NAMES = [mode.name for mode in MODES]
BY_NAME = {mode.name: mode for mode in MODES}


def config(**changes: Any) -> ModelConfig:
    shape = {"vocab_size": VOCAB, "seq_len": 16, "d_model": 16, "n_heads": 2, "d_ff": 24, "n_loops": LOOPS}
    shape |= {"n_prelude": 0, "n_core": 1, "n_coda": 0, "inject": {"kind": "concat"}}
    return ModelConfig.model_validate(shape | changes)


def model_of(**changes: Any) -> RecurrentLM:
    """In fp64, with weights that are large enough for loops to matter."""
    model = RecurrentLM(config(**changes)).init(0).double().eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.2 * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    return model


def prompts(n: int) -> list[tuple[int, ...]]:
    return [tuple(row[:N_PROMPT]) for row in Script.of(n, N_PROMPT, VOCAB, [1.0], 3).tokens]


def work(concurrency: int = 2, acceptance: float | None = 0.6, **changes: Any) -> Work:
    n = REQUESTS * concurrency
    script = None if acceptance is None else Script.of(n, N_PROMPT + N_NEW, VOCAB, [acceptance], 4)
    made = Work(model_of(), prompts(n), N_NEW, spread_depths(n, N_READ, LOOPS, 2.3, 5), LOOPS, script=script)
    return replace(made, **{"draft_loops": 1, "width": 8, **changes})


# -- the work -------------------------------------------------------------------------------------------------------


def test_drawn_depths_have_their_mean_and_the_most_entropy() -> None:
    depths_BT = spread_depths(200, 500, 8, 4.9).depths_BT
    assert depths_BT.shape == (200, 500) and int(depths_BT.min()) == 1 and int(depths_BT.max()) == 8
    assert float(depths_BT.double().mean()) == pytest.approx(4.9, abs=0.02)
    # Of the most entropy for its mean: neighbouring depths are in one ratio.
    share_R = depths_BT.flatten().bincount(minlength=9)[1:].double() / depths_BT.numel()
    ratio_R = share_R[1:] / share_R[:-1]
    assert float(ratio_R.min()) > 1 and float(ratio_R.max() / ratio_R.min()) < 1.1
    # In the middle all depths are as likely.
    even_R = spread_depths(200, 500, 8, 4.5).depths_BT.flatten().bincount(minlength=9)[1:].double() / 100_000
    assert even_R.tolist() == pytest.approx([1 / 8] * 8, abs=0.004)
    for end in (1, 8):
        assert set(spread_depths(3, 50, 8, end).depths_BT.flatten().tolist()) == {end}
    assert torch.equal(spread_depths(3, 9, 8, 3, 1).depths_BT, spread_depths(3, 9, 8, 3, 1).depths_BT)
    assert not torch.equal(spread_depths(3, 9, 8, 3, 1).depths_BT, spread_depths(3, 9, 8, 3, 2).depths_BT)
    for mean in (0.9, 8.1, math.nan):
        with pytest.raises(UsageError, match="from 1 to the loops that run, 8"):
            spread_depths(1, 1, 8, mean)


def test_a_script_is_a_function_of_row_and_position() -> None:
    shares = [0.4, 0.7]
    script = Script.of(40, 100, VOCAB, shares, 1)
    assert script == Script.of(40, 100, VOCAB, shares, 1) and script.tokens != Script.of(40, 100, VOCAB, [1], 2).tokens
    assert {token for row in script.tokens for token in row} == set(range(VOCAB))
    right = [
        [script.draft(row, at, loops) == script.tokens[row][at] for row in range(40) for at in range(100)]
        for loops in (1, 2, 3)
    ]
    assert [sum(one) / len(one) for one in right[:2]] == pytest.approx(shares, abs=0.03) and right[2] == right[1]
    assert all(later for early, later in zip(*right[:2], strict=True) if early), "what is right stays right"
    for acceptance in (0.0, 1.0):
        one = Script.of(9, 9, VOCAB, [acceptance])
        assert {one.draft(row, at, 1) == one.tokens[row][at] for row in range(9) for at in range(9)} == {
            bool(acceptance)
        }


@pytest.mark.parametrize("mode", [*MODES, UNIFORM], ids=lambda mode: mode.name)
def test_every_mode_does_the_recorded_work(mode: Mode) -> None:
    """Tokens are the script's; loops are the trace's, or all; launches are of so many rows as tokens ran loops."""
    one = work(uniform=3)
    engine = one.engine(mode, 2)
    completions = [done for (done,) in engine.run(one.requests(mode, 4, one.test(mode)))]
    engine.check_idle()
    deep = one.loops(mode)
    assert deep == (3 if mode is UNIFORM else LOOPS)
    for row, done in enumerate(completions):
        assert one.script is not None and done.error is None
        assert [token.token for token in done.tokens] == one.script.tokens[row][N_PROMPT : N_PROMPT + N_NEW]
        told = one.trace.depths_BT[row, :N_READ].tolist() if mode.exits == "trace" else [deep] * N_READ
        assert done.prompt_loops == told[:N_PROMPT]
        assert [token.loops for token in done.tokens] == told[N_PROMPT - 1 :]
    executed = sum(token.loops for done in completions for token in done.tokens[1:])
    if mode.drafts:
        assert engine.stats.rows["core"] >= executed
    else:
        assert engine.stats.rows["core"] == executed


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 1.0])
def test_drafts_are_right_as_the_script_has_it(acceptance: float) -> None:
    one = work(acceptance=acceptance)
    assert one.script is not None
    # One at a time, so that no draft waits for another to share a launch with.
    seen = timed(one, BY_NAME["wavefront"], 1, 2 * REQUESTS).stats
    coins = [coin < acceptance for row in one.script.coins for coin in row[N_PROMPT + 1 : N_PROMPT + N_NEW - 1]]
    # Fixed depth, and room to spare: every token is drafted and held against the text, but the first, which comes of
    # the prompt, and the last, after which nothing is to be read.
    assert seen.checked == len(coins) and seen.accepted == sum(coins)
    assert seen.drafts > seen.checked if acceptance < 1 else seen.drafts == seen.checked


def test_recorded_depths_are_those_of_decoding() -> None:
    model, n = model_of(n_coda=1), 3
    test = StateChange(threshold=1.0).build(model, LOOPS)
    trace = record(Engine(model, Options(width=4, places=2)), prompts(n), N_NEW, test)
    for row, prompt in enumerate(prompts(n)):
        depths: list[torch.Tensor] = []
        how = {"loops": LOOPS, "max_tokens": N_NEW, "rule": test, "depths": depths, "dtype": torch.float32}
        tokens = list(decode(model, prompt, **how))
        assert len(tokens) == N_NEW
        assert torch.cat(depths, 1)[0, :N_READ].tolist() == trace.depths_BT[row].tolist()
    assert trace.depths_BT.shape == (n, N_READ) and trace.depths_BT.unique().numel() > 1
    # Replayed, they give the rule's tokens.
    one = Work(model, prompts(n), N_NEW, trace, LOOPS)
    engine = one.engine(BY_NAME["refill"], 3)
    replayed = engine.run(one.requests(BY_NAME["refill"], n, one.test(BY_NAME["refill"])))
    for prompt, (done,) in zip(prompts(n), replayed, strict=True):
        assert done.ids == list(decode(model, prompt, loops=LOOPS, max_tokens=N_NEW, rule=test, dtype=torch.float32))


def test_a_trace_that_does_not_fit_is_refused() -> None:
    one = work()
    for trace, says in (
        (Trace(one.trace.depths_BT[:, 1:], LOOPS, "at_exit"), f"rows of {N_READ - 1} tokens"),
        (Trace(one.trace.depths_BT[:0], LOOPS, "at_exit"), "0 rows"),
        (Trace(one.trace.depths_BT * (torch.arange(N_READ) > 0), LOOPS, "at_exit"), "padding"),
    ):
        with pytest.raises(UsageError, match=says):
            replace(one, trace=trace)
    # Longer, with fewer rows: they are used again.
    longer = Trace(torch.full((1, 30), 2), LOOPS, "at_exit")
    assert timed(replace(one, trace=longer), BY_NAME["refill"], 2).stats.mean_loops == 2


def test_modes_take_turns_and_do_what_they_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each slice of a mode it has as large a share of its tokens as there were slices, and no mode is two slices
    ahead of another; what is decoded is what each decodes alone."""
    one, modes, n = work(acceptance=None), list(MODES), 2
    ran: list[tuple[str, float]] = []
    real = Decoding.go

    def go(run: Decoding, share: float = 1.0) -> None:
        real(run, share)
        assert run.engine.stats.tokens >= share * run.n_tokens
        ran.append((run.mode.name, share))

    monkeypatch.setattr(Decoding, "go", go)
    shares: list[float] = []
    found = timed_in_turn(one, modes, n, shares.append)
    assert len(ran) == len(shares) == SLICES * len(modes) and sum(shares) == pytest.approx(1)
    for i in range(SLICES):
        part = ran[i * len(modes) : (i + 1) * len(modes)]
        names = [mode.name for mode in modes]
        assert part == [(name, (i + 1) / SLICES) for name in (names if i % 2 == 0 else names[::-1])]
    for mode, timing in zip(modes, found, strict=True):
        alone = timed(one, mode, n)
        assert timing.tokens == alone.tokens and timing.n_requests == alone.n_requests == n * REQUESTS
        assert timing.stats.tokens == alone.stats.tokens == timing.n_requests * N_NEW
        assert 0 < timing.stats.wall_s <= timing.seconds


def test_a_request_that_fails_is_told() -> None:
    one = work(acceptance=None)
    for weight in one.model.parameters():
        weight.data.fill_(math.nan)
    with pytest.raises(RunError, match=r"mode fixed: a request ended by error: .*not finite"):
        timed(one, BY_NAME["fixed"], 2)


# -- figures --------------------------------------------------------------------------------------------------------


def timing(seconds: float, piece_s: float, model_s: float, loops: dict[int, int]) -> Timing:
    stats = Stats(tokens=20, wall_s=seconds, loops=Counter(loops), drafts=9, checked=8, accepted=6)
    stats.seconds["piece"], stats.model_s["piece"], stats.model_s["core"] = piece_s, piece_s, model_s
    stats.launches.update(core=10, piece=2)
    stats.rows.update(core=25, piece=16)
    return Timing(seconds, stats, 4, [[1]], 1000)


def test_figures_by_hand() -> None:
    one = work()
    found = {
        "fixed": [timing(4.0, 1.0, 2.4, {4: 20}), timing(8.0, 1.0, 5.6, {4: 20}), timing(5.0, 1.0, 3.2, {4: 20})],
        "refill": [timing(2.0, 0.0, 1.8, {2: 20}), timing(2.0, 0.0, 1.8, {2: 20}), timing(2.0, 0.0, 1.8, {2: 20})],
    }
    score = bench_module._score(one, BY_NAME["refill"], 2, found, {})
    assert score.ratio == Spread.of([2.0, 4.0, 2.5]) and score.ratio.median == 2.5
    assert (score.tokens_per_s.median, score.decode_tokens_per_s.median) == (10.0, 8.0)
    # Of fixed depth, prompts left out: 16 tokens in 3, 7 and 4 seconds.
    assert score.decode_ratio.median == pytest.approx(8.0 / (16 / 4.0))
    assert score.mean_loops == 2.0 and score.bound == flop_bound(one.model.config, LOOPS, 2.0)
    assert score.of_bound == pytest.approx(2.5 / score.bound) and score.decode_of_bound == pytest.approx(
        2 / score.bound
    )
    assert score.overhead == pytest.approx(0.1)
    assert bench_module._score(one, BY_NAME["fixed"], 2, found, {}).overhead == pytest.approx(0.2)
    assert score.launches == {"core": 10, "piece": 2} and score.mean_width == {"core": 2.5, "piece": 8.0}
    assert (score.drafts, score.checked, score.accepted) == (9, 8, 6)
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)


def test_the_bound_is_of_the_ledger() -> None:
    """(F0 + R Fr) / (F0 + d Fr), from what ``alcoda cost`` says of whole depths."""
    for shape in (config(), config(n_prelude=1, n_coda=1), config(keys={"kind": "anchor"})):
        flops = {n: alcoda.cost(shape, n).forward_flops_per_token for n in (1, 2, 3, LOOPS)}
        for n, of_n in flops.items():
            assert flop_bound(shape, LOOPS, n) == pytest.approx(flops[LOOPS] / of_n, rel=1e-12)
        between = (flops[2] + flops[3]) / 2
        assert flop_bound(shape, LOOPS, 2.5) == pytest.approx(flops[LOOPS] / between, rel=1e-12)
    # By hand: a layer of 4 maps 16 x 16, 3 of 16 x 24, scores and values over 16 keys; the injection; the head.
    core = 2 * 4 * 16 * 16 + 2 * 3 * 16 * 24 + 2 * 2 * 16 * 16 + 2 * 2 * 16 * 16
    head = 2 * 16 * VOCAB
    assert alcoda.cost(config(), 1).forward_flops_per_token == core + head
    assert flop_bound(config(), LOOPS, 2.5) == pytest.approx((head + 4 * core) / (head + 2.5 * core))


def test_overhead_is_what_is_not_in_the_model() -> None:
    watch = Stopwatch()
    for _ in range(3):
        with watch:
            sum(range(2000))
    assert watch.take() > 0 and watch.take() == 0
    one = work()
    stats = timed(one, BY_NAME["refill"], 2).stats
    assert set(stats.model_s) == {"core", "coda", "piece"}
    for kind, seconds in stats.model_s.items():
        assert 0 < seconds < stats.seconds[kind] + (stats.wall_s - sum(stats.seconds.values()))
    outside = stats.wall_s - stats.seconds["piece"] - stats.model_s["core"] - stats.model_s["coda"]
    assert stats.overhead == pytest.approx(outside / (stats.wall_s - stats.seconds["piece"])) and 0 < stats.overhead < 1


# -- the whole ------------------------------------------------------------------------------------------------------


def test_tokens_are_the_same_where_they_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for acceptance, at_once in ((0.6, [1, 2]), (None, [1])):
        one = work(acceptance=acceptance, uniform=3)
        found = bench(one, at_once, 1, what="tiny", depths="drawn", acceptance=acceptance, deterministic=True)
        assert [(one.concurrency, one.mode) for one in found.scores] == [
            (n, name) for n in at_once for name in (*NAMES, "uniform")
        ]
        same = {one.mode: (one.same_tokens_as, one.tokens_identical) for one in found.scores}
        assert same["wavefront"] == ("fixed", True) and same["refill_wavefront"] == same["no_refill"] == (
            "refill",
            True,
        )
        assert same["fixed"] == same["masked"] == same["uniform"] == (None, None) and found.tokens_differ == []
        assert found.simulated == (acceptance is not None)
    real = bench_module.timed

    def broken(work: Work, mode: Mode, *arguments: Any, **how: Any) -> Timing:
        one = real(work, mode, *arguments, **how)
        return replace(one, tokens=one.tokens[::-1]) if mode.name == "wavefront" else one

    monkeypatch.setattr(bench_module, "timed", broken)
    found = bench(work(), [1], 1, what="tiny", depths="drawn", deterministic=True)
    assert found.tokens_differ == ["wavefront and fixed at concurrency 1"]


def test_the_rule_itself_gives_what_its_record_gives() -> None:
    """The modes that ask it run the same loops of the same tokens, and spend time on asking."""
    asked: list[int] = []

    class Watched(StateTest):
        def score(self, seen: Seen, kept: Kept) -> tuple[torch.Tensor, Kept]:
            asked.append(len(seen.h_ND))
            return super().score(seen, kept)

    one = work(acceptance=None)
    test = Watched(one.model, Bounds(1, LOOPS, 0, (0.9,) * LOOPS))
    depths = record(one.engine(BY_NAME["refill"], 2), one.prompts, N_NEW, test)
    assert len(depths.depths_BT.unique()) > 1
    one, n_asked = replace(one, trace=depths, rule=test), []
    for name in ("refill", "rule", "refill_wavefront", "rule_wavefront"):
        asked.clear()
        mode = next(mode for mode in (*MODES, *RULE) if mode.name == name)
        found = timed(one, mode, 2, deterministic=True)
        n_asked.append(len(asked))
        assert found.tokens == timed(one, BY_NAME["refill"], 2, deterministic=True).tokens
        assert found.stats.loops == timed(one, BY_NAME["refill"], 2).stats.loops
    assert n_asked[0] == n_asked[2] == 0 < min(n_asked[1], n_asked[3])
    names = [score.mode for score in bench(one, [1], 1, what="tiny", depths="of a rule").scores]
    assert names == [*NAMES, "rule", "rule_wavefront"]


def test_scripted_tokens_are_compared_by_what_the_model_says() -> None:
    """Else tokens of a script would be the same whatever the engine did."""
    one, fixed = work(), BY_NAME["fixed"]
    told, plain = (timed(replace(one, script=script), fixed, 2).tokens for script in (one.script, None))
    assert one.script is not None
    assert told != [row[N_PROMPT:] for row in one.script.tokens]
    assert [row[0] for row in told] == [row[0] for row in plain] and told != plain


def test_a_shape_and_what_it_cannot_be() -> None:
    how = {"shape": config(), "concurrency": [2], "rounds": 1, "dtype": "float32", "mean_depth": 2.0, "width": 8}
    found = alcoda.bench_engine(**how)
    assert [one.mode for one in found.scores] == NAMES
    assert (found.prompt_tokens, found.tokens, found.loops, found.simulated) == (8, 8, LOOPS, True)
    assert (found.draft_loops, found.acceptance) == (DRAFT_LOOPS, ACCEPTANCE[DRAFT_LOOPS - 1])
    assert found.params == alcoda.cost(config()).params and found.weights_bytes == 4 * found.params
    with torch.device("meta"):
        parts = list(RecurrentLM(config()).modules())
    # On a CPU the engine of a small model lays its maps out once more, in fp32, and its tied head; norms twice over.
    maps = sum(part.weight.numel() for part in parts if type(part) is torch.nn.Linear)
    norms = sum(part.weight.numel() for part in parts if type(part) is RMSNormModule and part.weight is not None)
    laid_out = 0 if torch.cuda.is_available() else maps + 2 * norms + config().vocab_size * config().d_model
    assert found.held_bytes == 4 * (found.params + laid_out) and found.machine["dtype"] == "float32"
    per_token = 2 * 1 * LOOPS * 16 * 4
    assert found.score("refill", 2).cache_bytes == 2 * (8 + 8 - 1) * per_token
    assert found.score("fixed", 2).ratio == Spread(1.0, 1.0, 1.0) and found.score("fixed", 2).of_bound == 1
    half = alcoda.bench_engine(**how | {"dtype": "bfloat16"})
    assert half.weights_bytes == 2 * found.params and half.machine["dtype"] == "bfloat16"
    depths = spread_depths(4, 15, LOOPS, 1.0)
    assert alcoda.bench_engine(**how | {"mean_depth": None, "trace": depths, "uniform": 3}).score("uniform", 2)
    for changes, says in (
        ({"mean_depth": 5.0}, "from 1 to the loops that run, 4"),
        ({"mean_depth": None}, "mean depth 4.9"),
        ({"uniform": 5}, "uniform=5: 4 loops run"),
        ({"uniform": 0}, "uniform=0: at least 1"),
        ({"concurrency": []}, "one number or more"),
        ({"concurrency": [2, 2]}, "each once"),
        ({"concurrency": [0]}, "concurrency=0: at least 1"),
        ({"rounds": 0}, "rounds=0: at least 1"),
        ({"width": 0}, "width=0: at least 1"),
        ({"draft_loops": 0}, "draft_loops=0: at least 1"),
        ({"draft_loops": 9}, "say it with acceptance"),
        ({"acceptance": 1.5}, "a share, from 0 to 1"),
        ({"tokens": 1}, "at least 2"),
        ({"tokens": 9}, "the context holds 16"),
        ({"exit": "balanced", "mean_depth": None}, "random weights have no tiers"),
        ({"trace": depths}, "depths are of one of them"),
        ({"trace": "nowhere.safetensors", "mean_depth": None}, "no such file"),
        ({"run": "runs/none"}, "name one of them"),
        ({"dtype": "float8"}, "unknown dtype 'float8'"),
        ({"shape": "engine/d51"}, "engine/d512"),
        ({"shape": config(n_core=0, n_prelude=1, n_loops=1, inject={"kind": "none"})}, "this model is dense"),
        ({"shape": config(sharing={"kind": "untied"})}, "cannot serve this model"),
    ):
        with pytest.raises(UsageError, match=says):
            alcoda.bench_engine(**how | changes)


def test_a_memory_of_the_loop_has_no_wavefront() -> None:
    model = model_of(memory={"kind": "prev_token"})
    one = Work(model, prompts(2), N_NEW, spread_depths(2, N_READ, LOOPS, 2.0), LOOPS)
    found = bench(one, [1], 1, what="tiny", depths="drawn")
    assert [score.mode for score in found.scores] == ["fixed", "masked", "no_refill", "refill"]
    assert len(found.notes) == 1 and found.notes[0].startswith("no wavefront: draft_loops with a memory")


def test_the_recipe_of_the_shape() -> None:
    shape = alcoda.load_recipe("engine/d512").model
    assert (shape.d_model, shape.n_heads, shape.shape.d_ff, shape.n_core, shape.n_loops) == (512, 8, 1408, 4, 8)
    assert (shape.n_prelude, shape.n_coda, shape.vocab_size, shape.inject.kind) == (0, 0, 8192, "concat")

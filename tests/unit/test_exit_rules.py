"""Exit rules on numbers worked out by hand, and what they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exit_models import IDS, R, lm
from torch import Tensor

from alcoda.depth.exiting import Exits
from alcoda.depth.record import ProbeWeights, Trace, fingerprint
from alcoda.depth.replay import replay
from alcoda.depth.rules import (
    NEVER,
    ArgmaxStable,
    CosineChange,
    EntropyChange,
    ExitRule,
    Fixed,
    Gate,
    Kl,
    LastKl,
    MinPKl,
    Probe,
    SecondOrder,
    StateChange,
    TraceRule,
    read_rule,
    rules,
)
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest, Seen, Where
from alcoda.engine.decode import decode
from alcoda.errors import UsageError
from alcoda.model.cost import ledger
from alcoda.model.positions import rotate
from alcoda.model.recurrence.exit_gate import log_exit_prior


def watch(
    test: ExitTest, states: list[list[float]], logits: list[list[float]] | None = None, loop: int | Tensor = 1
) -> list[tuple[bool, float]]:
    """(leaves, score) of one row after each loop; ``states`` from before the first."""
    h = [torch.tensor([state], dtype=torch.float64) for state in states]
    kept, found = test.start(h[0], Where(torch.tensor([0]), torch.tensor([0]))), []
    for i in range(1, len(h)):
        z = torch.tensor([logits[i - 1] if logits else [0.0]], dtype=torch.float64)
        leaves, score, kept = test.exits(Seen(i, h[i - 1], h[i], lambda z=z: z), kept)
        found.append((bool(leaves), float(score)))
    return found


def built(rule: ExitRule, n_loops: int = R, given: Any = None, **fields: Any) -> ExitTest:
    return rule.build(lm(**fields), n_loops, given)


# -- known values -----------------------------------------------------------------------------------------------------


def test_state_is_the_relative_change() -> None:
    found = watch(built(StateChange(threshold=0.5)), [[3, 0], [3, 4], [3, 4.5], [3, 4.5]])
    assert [s for _, s in found] == pytest.approx([4 / 5, 0.5 / math.hypot(3, 4.5), 0.0])
    assert [leaves for leaves, _ in found] == [False, True, True]


def test_kl_is_in_nats_of_the_newer_distribution() -> None:
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    logits = [[math.log(x) for x in dist] for dist in (q, p, p)]
    found = watch(built(Kl(threshold=0.2)), [[1, 0]] * 4, logits)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert found[0] == (False, math.inf)  # there is nothing before the first loop
    assert found[1] == (True, pytest.approx(expected)) and found[2] == (True, pytest.approx(0.0))


def test_huginns_criteria() -> None:
    """Each against its equation, on distributions that tell them apart."""
    p, q = [0.7, 0.25, 0.05], [0.3, 0.65, 0.05]
    logits = [[math.log(x) + shift for x in dist] for dist, shift in ((q, 0.0), (p, 3.0), (p, 3.0))]

    def scores(rule: ExitRule) -> list[float]:
        found = [score for _, score in watch(built(rule), [[1, 0]] * 4, logits)]
        assert found[0] == math.inf and found[2] == pytest.approx(0.0)
        return found[1:2]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    def entropy(a: list[float]) -> float:
        return -sum(x * math.log(x) for x in a)

    assert scores(LastKl()) == pytest.approx([kl(q, p)]) != pytest.approx([kl(p, q)])
    assert scores(EntropyChange()) == pytest.approx([abs(entropy(p) - entropy(q))])
    # 0.05 is under a tenth of either's likeliest, and becomes a third before all is normed anew.
    p_kept, q_kept = ([x / (a + b + 1 / 3) for x in (a, b, 1 / 3)] for a, b in ((0.7, 0.25), (0.3, 0.65)))
    assert scores(MinPKl()) == pytest.approx([kl(q_kept, p_kept)])
    assert scores(MinPKl(min_p=1e-3)) == pytest.approx([kl(q, p)])


def test_kl_is_never_below_zero() -> None:
    """Rounding in fp32 would leave it there."""
    test = built(Kl(threshold=0.0))
    z = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    h = torch.ones(500, 2)
    kept = test.start(h, Where(torch.zeros(500, dtype=torch.long), torch.arange(500)))
    _, _, kept = test.exits(Seen(1, h, h, lambda: z), kept)
    leaves, score, _ = test.exits(Seen(2, h, h, lambda: z + 3), kept)
    assert score.dtype == torch.float32 and (score >= 0).all() and not leaves.any()


def test_cosine_is_of_directions_alone() -> None:
    found = watch(built(CosineChange(threshold=1e-3)), [[0, 0], [3, 4], [4, 3], [8, 6], [-8, -6]])
    assert [s for _, s in found] == pytest.approx([1.0, 1 - 24 / 25, 0.0, 2.0])
    assert [leaves for leaves, _ in found] == [False, False, True, True]  # the last, because it is the last


def test_second_order_is_the_change_of_the_change() -> None:
    states: list[list[float]] = [[0, 0], [4, 0], [6, 0], [7, 0], [7, 0]]  # changes 4, 2, 1, 0
    one = [s for _, s in watch(built(SecondOrder(hits=1)), states)]
    assert one == pytest.approx([math.inf, 2 / 6, 1 / 7, 1 / 7])
    two = [s for _, s in watch(built(SecondOrder()), states)]
    assert two == pytest.approx([math.inf, math.inf, 2 / 6, 1 / 7])  # the larger of two in a row


def test_argmax_that_stays_counts_down() -> None:
    logits: list[list[float]] = [[1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0]]
    found = watch(built(ArgmaxStable(loops=2)), [[1, 0]] * 5, logits)
    assert found == [(False, 2.0), (False, 2.0), (False, 1.0), (True, 0.0)]
    never = watch(built(ArgmaxStable()), [[1, 0]] * 4, logits[:3])
    assert never == [(False, math.inf)] * 3


def test_gate_is_the_share_that_goes_on() -> None:
    test = built(Gate(threshold=0.3))
    with torch.no_grad():
        test.model.exit_gate.proj.weight.copy_(torch.tensor([[1.0, 0.0]]))
        test.model.exit_gate.proj.bias.zero_()
        found = watch(test, [[9, 9], [0, 1], [0, 1], [0, 1]])  # lambda 1/2 each
    assert [s for _, s in found] == pytest.approx([0.5, 0.25, 0.125])
    assert [leaves for leaves, _ in found] == [False, True, True]


def test_gate_is_the_models_prior() -> None:
    """1 minus the prior's sum, of the objective's own formula."""
    model = lm()
    scores = replay(model, IDS, Gate(), scores=True).scores_BTR
    assert scores is not None
    with torch.no_grad():
        gates = [model.exit_gate(one.state.h_BTD) for one in model.readouts(IDS, range(1, R + 1))]
    prior_RBT = log_exit_prior([*gates, gates[-1]]).exp()
    assert torch.allclose(scores, 1 - prior_RBT[:-1].cumsum(0).movedim(0, -1))


def test_probe_is_a_logistic_regression_with_a_bias_a_loop() -> None:
    model = lm()
    probe = ProbeWeights(
        torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0, 0.0, 0.0]), "argmax_changes", fingerprint(model)
    )
    found = watch(Probe(threshold=0.9).build(model, R, probe), [[0, 0], [3, 4], [3, 4]])
    z = 11 / math.sqrt(12.5)  # over the root mean square of (3, 4)
    assert [s for _, s in found] == pytest.approx([1 / (1 + math.exp(-z)), 1 / (1 + math.exp(-z - 1))], abs=1e-6)


def test_fixed_and_trace_count_down() -> None:
    assert [leaves for leaves, _ in watch(built(Fixed(loops=2)), [[1, 0]] * 4)] == [False, True, True]
    trace = Trace(torch.tensor([[3, 1]]), R, "at_exit")
    assert [leaves for leaves, _ in watch(built(TraceRule(), given=trace), [[1, 0]] * 4)] == [False, False, True]


def leaves_first(test: ExitTest, position: int) -> int:
    """After which loop the token at a position of row 0 leaves, by asking after each."""
    h, at = torch.ones(1, 2, dtype=torch.float64), Where(torch.tensor([0]), torch.tensor([position]))
    kept = test.start(h, at)
    for loop in range(1, R + 1):
        leaves, _, kept = test.exits(Seen(loop, h, h, lambda: h), kept)
        if leaves:
            return loop
    raise AssertionError("it stays")


@pytest.mark.parametrize("bounds", [(None, None), (2, None), (None, 2), (3, 3)])
def test_a_depth_that_is_known_beforehand_is_the_one_found_by_asking(bounds: tuple[int | None, int | None]) -> None:
    trace = Trace(torch.tensor([[3, 1, 0, R]]), R, "at_exit")
    tests = [built(Fixed(loops=n)) for n in range(1, R + 1)] + [built(NEVER), built(TraceRule(), given=trace)]
    for test in (one.within(*bounds) for one in tests):
        for position in range(4):
            assert test.known(0, position) == leaves_first(test, position)
    assert tests[-1].known(0, 0) != tests[-1].known(0, 1), "it is the token's own"


@pytest.mark.parametrize("kind", sorted(set(rules()) - {"fixed", "trace", "probe"}))
def test_a_rule_that_looks_at_loops_knows_nothing_beforehand(kind: str) -> None:
    assert built(rules()[kind].model_validate({"kind": kind})).known(0, 0) is None


@pytest.mark.parametrize("kind", sorted(set(rules()) - {"trace", "probe"}))
@pytest.mark.parametrize("horizon", [0, 1])
def test_a_rule_says_whether_it_keeps_anything(kind: str, horizon: int) -> None:
    fields = {"horizon": horizon} if "horizon" in rules()[kind].model_fields else {}
    test, h = built(rules()[kind].model_validate({"kind": kind} | fields)), torch.ones(1, 2, dtype=torch.float64)
    assert test.keeps == bool(test.start(h, Where(torch.tensor([0]), torch.tensor([0]))))


# -- bounds -----------------------------------------------------------------------------------------------------------

STILL: list[list[float]] = [[1, 0]] * 5
"""A state that does not change: below every threshold at once."""


def left_after(rule: ExitRule) -> int:
    """After which loop the row first leaves."""
    return 1 + [leaves for leaves, _ in watch(built(rule), STILL)].index(True)


def test_bounds() -> None:
    assert left_after(StateChange(threshold=1.0)) == 1
    assert left_after(StateChange(threshold=1.0, min_loops=3)) == 3
    assert left_after(StateChange(threshold=0.0)) == left_after(StateChange()) == R
    assert left_after(StateChange(max_loops=2)) == 2
    assert left_after(StateChange(threshold=(0.0, 0.0, 1.0, 1.0))) == 3


def test_a_horizon_acts_a_loop_late() -> None:
    assert left_after(StateChange(threshold=1.0, horizon=1)) == 2
    assert left_after(StateChange(threshold=1.0, horizon=1, min_loops=3)) == 3
    assert left_after(StateChange(threshold=(0.0, 1.0, 0.0, 0.0), horizon=1)) == 3  # though loop 3 would not decide so
    assert left_after(StateChange(threshold=1.0, horizon=1, max_loops=1)) == 1


def test_a_score_at_the_threshold_stays() -> None:
    found = watch(built(StateChange(threshold=0.8)), [[3, 0], [3, 4]])
    assert found[0] == (False, 0.8)


def test_rows_may_be_at_different_loops() -> None:
    """One call on rows of loops 1 to 4 is a call on each."""
    test = built(StateChange(threshold=(0.1, 0.2, 0.3, 0.4), min_loops=2, max_loops=4))
    before = torch.tensor([[1.0, 0.0]] * 4, dtype=torch.float64)
    after = before * 1.25
    where = Where(torch.zeros(4, dtype=torch.long), torch.arange(4))
    together = test.exits(Seen(torch.arange(1, 5), before, after, lambda: before), test.start(before, where))
    for i in range(4):
        row = slice(i, i + 1)
        one = Where(where.row_N[row], where.token_N[row])
        alone = test.exits(Seen(i + 1, before[row], after[row], lambda: before), test.start(before[row], one))
        assert torch.equal(together[0][row], alone[0]) and torch.equal(together[1][row], alone[1])
    assert together[0].tolist() == [False, False, True, True]


@pytest.mark.parametrize("kind", sorted(set(rules()) - {"trace", "probe"}))
def test_rules_that_keep_something_may_mix_loops_too(kind: str) -> None:
    model = lm()
    rule = rules()[kind].model_validate(
        {"kind": kind} | ({"loops": 1} if "loops" in rules()[kind].model_fields else {})
    )
    test = rule.build(model, R)
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(R + 1, 2, 2, generator=generator, dtype=torch.float64)
    z = torch.randn(R + 1, 2, 3, generator=generator, dtype=torch.float64)
    where = Where(torch.tensor([0, 0]), torch.tensor([0, 1]))

    def seen(loop: int, row: slice) -> Seen:
        return Seen(loop, h[loop - 1, row], h[loop, row], lambda: z[loop, row])

    def run(row: slice, loops: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept, score = test.start(h[0, row], Where(where.row_N[row], where.token_N[row])), torch.empty(0)
        for loop in range(1, loops + 1):
            _, score, kept = test.exits(seen(loop, row), kept)
        return score, kept

    with torch.no_grad():
        kept = tuple(torch.cat(pair) for pair in zip(run(slice(0, 1), 1)[1], run(slice(1, 2), 2)[1], strict=True))
        at = torch.tensor([2, 3])
        mixed = Seen(
            at,
            torch.stack([h[1, 0], h[2, 1]]),
            torch.stack([h[2, 0], h[3, 1]]),
            lambda: torch.stack([z[2, 0], z[3, 1]]),
        )
        _, score, _ = test.exits(mixed, kept)
        expected = torch.cat([run(slice(0, 1), 2)[0], run(slice(1, 2), 3)[0]])
    assert torch.equal(score, expected)


# -- replay by hand ---------------------------------------------------------------------------------------------------


def test_later_tokens_read_the_keys_of_the_last_loop() -> None:
    """One layer, keys by hand: at loop r, token t's are of loop min(r, d_t)."""
    model = lm(n_prelude=0, n_core=1, n_coda=0, inject="add")
    trace = Trace(torch.tensor([[1, 3, 2, 4, 3]]), R, "at_exit")
    found = replay(model, IDS, TraceRule().build(model, R, trace))
    block, depths = model.core.at(0).layers[0], trace.depths_BT[0].tolist()
    with torch.no_grad():
        states = {(t, 0): model.embed(IDS)[0, t] for t in range(5)}
        keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        for loop in range(1, R + 1):
            for t in range(5):
                h, e = states[t, loop - 1], model.embed(IDS)[0, t]
                if loop > depths[t]:
                    states[t, loop], keys[t, loop] = h, keys[t, loop - 1]
                    continue
                x = h + e
                a = block.attention_norm(x)
                rotation = model.position.rotation(torch.tensor([t]), torch.float64)
                context: Any = SimpleNamespace(recall=None, ids_BT=None)
                k, v = block.attention.keys(a[None, None], rotation, context)
                keys[t, loop] = k[0, 0, 0], v[0, 0, 0]
                q = rotate(block.attention.q(a)[None, None, None], rotation)[0, 0, 0]
                scores = torch.stack([q @ keys[s, loop][0] / math.sqrt(2) for s in range(t + 1)]).softmax(0)
                x = x + block.attention.out(sum(w * keys[s, loop][1] for s, w in enumerate(scores)))
                states[t, loop] = x + block.mlp(block.mlp_norm(x))
        y = model.final_norm(torch.stack([states[t, R] for t in range(5)]))
    assert torch.allclose(found.y_BTD[0], y, rtol=0, atol=1e-12)
    assert found.executed_loops == 13 and not found.is_upper_bound


def test_the_upper_bound_runs_all_loops_and_picks() -> None:
    model = lm(n_coda=2)
    trace = Trace(torch.tensor([[1, 3, 2, 4, 3]]), R, "per_loop")
    found = replay(model, IDS, TraceRule().build(model, R, trace), readout_only=True)
    with torch.no_grad():
        outs = [one.y_BTD for one in model.readouts(IDS, range(1, R + 1))]
    for t, depth in enumerate(trace.depths_BT[0].tolist()):
        assert torch.equal(found.y_BTD[0, t], outs[depth - 1][0, t])
    assert found.is_upper_bound and torch.equal(found.depths_BT, trace.depths_BT)


def test_scores_are_kept_where_the_rule_was_asked() -> None:
    found = replay(lm(), IDS, StateChange(threshold=(0.0, 9.0, 0.0, 0.0)), scores=True)
    assert found.scores_BTR is not None and found.depths_BT.tolist() == [[2] * 5]
    assert found.scores_BTR.isfinite().tolist() == [[[True, True, False, False]] * 5]


# -- cost, decoding ---------------------------------------------------------------------------------------------------


def test_looking_costs_what_the_page_says() -> None:
    config = lm(n_coda=2, readout_map="linear").config
    terms = {term.name: term.forward_flops for term in ledger(config).terms}
    readout = sum(flops for name, flops in terms.items() if name.split(".")[0] in ("coda", "readout_map", "head"))
    assert Kl().flops(config) == ArgmaxStable().flops(config) == readout > 0
    assert [rule.flops(config) for rule in (NEVER, TraceRule(), StateChange(), Gate(), Probe())] == [0, 0, 8, 4, 8]
    assert CosineChange().flops(config) == 12 and LastKl().flops(config) == readout


@pytest.mark.parametrize("fields", [{}, {"memory": "prev_token"}], ids=["plain", "memory"])
def test_decoding_is_replay(fields: dict[str, Any]) -> None:
    """Greedy decoding with exits, replayed: the same tokens and depths."""
    model, depths = lm(d_model=16, vocab_size=20, **fields), list[Tensor]()
    rule = StateChange(threshold=0.4)
    prompt = [3, 1, 4]
    with torch.no_grad():
        new = list(decode(model, prompt, loops=R, max_tokens=6, dtype=torch.float64, rule=rule, depths=depths))
        found = replay(model, torch.tensor([prompt + new[:-1]]), rule)
        assert model.logits(found.y_BTD)[0, 2:].argmax(-1).tolist() == new
    assert torch.cat(depths, 1).tolist() == found.depths_BT.tolist()
    assert len(set(found.depths_BT.flatten().tolist())) > 1


def test_a_reader_forgets_nothing_of_rows_that_wait() -> None:
    """A chunk in which one row is all padding, with exits."""
    model, rule = lm(d_model=16, vocab_size=20), StateChange(threshold=0.4)
    ids_BT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    test = rule.build(model, R)
    whole = model.logits(replay(model, ids_BT, test).y_BTD)
    reader = ExitReader(model, Exits(test, "at_exit"), capacity_tokens=2)
    with torch.no_grad():
        reader.read(ids_BT[:, :2])
        pos_BT, live_BT = torch.tensor([[2, 3], [0, 0]]), torch.tensor([[True] * 2, [False] * 2])
        reader.read(ids_BT[:, 2:4], None, pos_BT, live_BT)
        last = model.logits(reader.read(torch.tensor([[5], [6]])))
    assert torch.allclose(last[0, 0], whole[0, 4], rtol=0, atol=1e-10)
    assert torch.allclose(last[1, 0], whole[1, 2], rtol=0, atol=1e-10)
    assert reader.depths[1][1].tolist() == [0, 0]


@pytest.mark.parametrize("said", ["state:x", "state:nan"])
def test_a_threshold_that_is_none_is_told_in_words(said: str) -> None:
    with pytest.raises(UsageError, match=r"threshold: input should be") as found:
        read_rule(said)
    assert "validator" not in str(found.value) and "0x" not in str(found.value)

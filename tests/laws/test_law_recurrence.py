"""Law 4, of the recurrence: each choice in the loop computes its equations, written out by hand (`textbook`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import textbook as tb
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from space import house
from torch import Tensor

from alcoda.laws.law import close
from alcoda.laws.subject import make, tokens
from alcoda.model import merge
from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM
from alcoda.model.norms import RMSNorm
from alcoda.model.recurrence.inject import MOST_A, Diagonal, DiagonalModule

EXACT = 1e-10
B, T = 2, 9
LLAMA = tb.Kind(tb.rmsnorm, tb.swiglu_mlp, tb.rope, 4, 4)
NOPE = LLAMA._replace(rotation=tb.no_rotation)

Reference = Callable[[tb.Weights, Tensor, int], Tensor]


def weights_of(model: RecurrentLM) -> tb.Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check(model: RecurrentLM, reference: Reference, n_loops: int = 3, w: tb.Weights | None = None) -> None:
    ids_BT = tokens(B, T)
    expected = reference(weights_of(model) if w is None else w, ids_BT, n_loops)
    with torch.no_grad():
        close(model(ids_BT, n_loops), expected, EXACT, "inference")
    close(model.train()(ids_BT, n_loops).detach(), expected, EXACT, "training")


def loop(step: Callable[[tb.Weights, Tensor, Tensor, int], Tensor], kind: tb.Kind = LLAMA) -> Reference:
    """Prelude, ``h = step(h, e, r)`` from ``h = e``, coda, norm, head."""

    def reference(w: tb.Weights, ids_BT: Tensor, n_loops: int) -> Tensor:
        e = tb.stack(w, "prelude", tb.embed(w, ids_BT), kind)
        h = e
        for r in range(n_loops):
            h = step(w, h, e, r)
        return tb.read_out(w, kind.norm(w, "final_norm", tb.stack(w, "coda", h, kind)))

    return reference


def core(w: tb.Weights, x: Tensor, kind: tb.Kind = LLAMA) -> Tensor:
    return tb.stack(w, "core.stack", x, kind)


def changed(model: RecurrentLM, name: str, by: float = 1e-3) -> tb.Weights:
    w = weights_of(model)
    w[name].view(-1)[0] += by
    return w


# -- CART -------------------------------------------------------------------------------------------------------------

CART: dict[str, Any] = {
    "n_core": 1,
    "block": {"attention": {"kind": "mla", "latent": 8}},
    "keys": "anchor",
    "carry": "hyper",
    "loop_index": {"kind": "sinusoidal", "dims": 6},
    "update": "lti",
}


def sinusoid(r: int, dims: int, base: float = 10_000.0) -> Tensor:
    values = []
    for i in range(dims // 2):
        angle = r * base ** (-2 * i / dims)
        values += [math.sin(angle), math.cos(angle)]
    return torch.tensor(values, dtype=torch.float64)


def cart(w: tb.Weights, ids_BT: Tensor, n_loops: int) -> Tensor:
    """papers.md 2.1, line by line; the core has no rotary positions."""
    e_BTD = tb.stack(w, "prelude", tb.embed(w, ids_BT), LLAMA)
    rows = []
    for e, ids_T in zip(e_BTD, ids_BT, strict=True):
        frozen = tb.keys_and_values(w, "keys.layers.0", e, ids_T)
        h, buffer = e, [e, e, e]
        mix = torch.exp(w["carry.logits"]) / torch.exp(w["carry.logits"]).sum()
        for r in range(n_loops):
            h_tilde = sum(m * state for m, state in zip(mix, buffer, strict=True))
            h_tilde = h_tilde + w["loop_index.proj.weight"] @ sinusoid(r, 6)
            f = tb.block(w, "core.stack.layers.0", h_tilde, NOPE, frozen=frozen)
            h = tb.sigmoid(w["update.a"]) * h_tilde + f
            buffer = [h, *buffer[:2]]
        rows.append(h)
    y_BTD = tb.stack(w, "coda", torch.stack(rows), LLAMA)
    return tb.read_out(w, tb.rmsnorm(w, "final_norm", y_BTD))


@pytest.mark.parametrize("n_loops", [1, 5])
def test_cart_is_its_equations(n_loops: int) -> None:
    check(make(house(**CART)), cart, n_loops)


@pytest.mark.parametrize(
    "name",
    ["keys.layers.0.latent.weight", "keys.layers.0.v.weight", "carry.logits", "update.a", "loop_index.proj.weight"],
)
def test_control_a_changed_weight_of_cart_is_noticed(name: str) -> None:
    model = make(house(**CART))
    with pytest.raises(AssertionError, match="inference"):
        check(model, cart, 3, changed(model, name))


def test_hyper_connections_start_as_cart_says() -> None:
    """softmax([1, 0, 0]) is no plain residual (papers.md 2.1, code-level finding 2); a large first logit is."""
    published = house(carry="hyper").carry.build(house().shape)
    with torch.no_grad():
        published.init_special()
    assert published.logits.softmax(-1).tolist() == pytest.approx([0.576, 0.212, 0.212], abs=5e-4)
    plain = house(carry={"kind": "hyper", "first_logit": 8.0}).carry.build(house().shape)
    with torch.no_grad():
        plain.init_special()
    assert plain.logits.softmax(-1)[0] > 0.999


# -- updates ----------------------------------------------------------------------------------------------------------


def test_lti_delta_keeps_the_branches_only() -> None:
    def step(w: tb.Weights, h: Tensor, e: Tensor, r: int) -> Tensor:
        x = h + e
        return tb.sigmoid(w["update.a"]) * x + (core(w, x) - x)

    check(make(house(inject="add", update="lti_delta")), loop(step))
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(inject="add", update="lti")), loop(step))


def silent_core(model: RecurrentLM) -> RecurrentLM:
    with torch.no_grad():
        for block in model.core.stack.layers:
            block.attention.out.weight.zero_()
            block.mlp.down.weight.zero_()
    return model


def test_lti_delta_with_a_silent_core_converges_to_a_multiple_of_the_anchor() -> None:
    """Inject add, no carry-in: h = s (h + e), whose fixed point is s / (1 - s) e."""
    model = silent_core(make(house(inject="add", update="lti_delta")))
    seen: list[Tensor] = []
    model.prelude.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        state = next(model.readouts(tokens(B, T), [200])).state
        s_D = torch.sigmoid(model.update.a)
    assert s_D.max() < 0.9  # so that 200 loops are enough: 0.9^200 = 7e-10
    close(state.h_BTD, s_D / (1 - s_D) * seen[0], 1e-8, "the fixed point")


def test_control_lti_as_published_does_not_converge() -> None:
    """Its gain is 1 + sigma(a): the state grows without bound (papers.md 2.1, code-level finding 1)."""
    model = silent_core(make(house(inject="add", update="lti")))
    with torch.no_grad():
        at_20, at_40 = (r.state.h_BTD.norm() for r in model.readouts(tokens(B, T), [20, 40]))
    assert at_40 > 1000 * at_20


def test_a_gate_near_one_still_writes_in_bf16() -> None:
    """At g = 0.9975 what is written, 1 - g, keeps bf16's eight bits and has a gradient; g itself would be rounded."""
    gate = make(house(update={"kind": "gate", "noise": 0.0})).update.float()
    with torch.no_grad():
        gate.logit.weight.zero_()
        gate.logit.bias.fill_(6.0)
    h, e, y = torch.zeros(1, 1, 32), torch.ones(1, 1, 32), torch.ones(1, 1, 32)
    with torch.autocast("cpu", torch.bfloat16):
        written = gate(h, h, y, e)
    assert written.mean().item() == pytest.approx(1 / (1 + math.exp(6)), rel=2**-7)
    written.sum().backward()
    assert gate.logit.bias.grad.abs().min() > 1e-3
    assert 1 - torch.sigmoid(torch.tensor(6.0, dtype=torch.bfloat16)) > 0.0035  # the other way round: 58 % off


# -- injections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", ["matrix", "diagonal"])
def test_parcae_is_its_equations(b: str) -> None:
    def step(w: tb.Weights, h: Tensor, e: Tensor, r: int) -> Tensor:
        delta = torch.log1p(torch.exp(w["inject.delta"]))
        a = torch.exp(-delta * torch.exp(w["inject.log_a"]))
        normed = tb.rmsnorm(w, "inject.norm", e)
        injected = normed @ w["inject.b.weight"].T if b == "matrix" else normed * w["inject.b.weight"]
        return core(w, a * h + delta * injected)

    def reference(w: tb.Weights, ids_BT: Tensor, n_loops: int) -> Tensor:
        e = tb.stack(w, "prelude", tb.embed(w, ids_BT), LLAMA)
        h = 0 * e
        for r in range(n_loops):
            h = step(w, h, e, r)
        y = tb.stack(w, "coda", h @ w["readout_map.weight"].T, LLAMA)
        return 15 * torch.tanh(tb.read_out(w, tb.rmsnorm(w, "final_norm", y)) / 15)

    fields = {"state_init": "zeros", "inject": {"kind": "diagonal", "b": b}, "readout_map": "linear"}
    check(make(house(**fields, soft_cap="tanh")), reference)
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(**fields)), reference)


@settings(max_examples=300, deadline=None)
@given(
    delta=st.floats(width=32, allow_nan=False, allow_infinity=False),
    log_a=st.floats(width=32, allow_nan=False, allow_infinity=False),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_diagonal_stays_under_one_for_any_parameters(delta: float, log_a: float, dtype: torch.dtype) -> None:
    module = DiagonalModule(Diagonal(), RMSNorm().build(house().shape), 4).to(dtype)
    with torch.no_grad():
        module.delta.fill_(delta)
        module.log_a.fill_(log_a)
    a_D = module.a()
    assert ((a_D >= 0) & (a_D <= MOST_A)).all()
    a_D.sum().backward()
    assert module.delta.grad is not None
    assert not module.delta.grad.isnan().any()


def test_control_a_diagonal_without_its_clamp_reaches_one() -> None:
    module = DiagonalModule(Diagonal(), RMSNorm().build(house().shape), 4)
    with torch.no_grad():
        module.delta.fill_(-200.0)
        module.log_a.fill_(0.0)
    assert torch.exp(-torch.nn.functional.softplus(module.delta) * module.log_a.exp()).max() == 1
    assert module.a().max() == MOST_A


def test_the_embedding_is_scaled_and_normed() -> None:
    def reference(scale: Callable[[tb.Weights, Tensor], Tensor]) -> Reference:
        def whole(w: tb.Weights, ids_BT: Tensor, n_loops: int) -> Tensor:
            e = tb.stack(w, "prelude", scale(w, w["embed.weight"][ids_BT]), LLAMA)
            for _ in range(n_loops):
                e = core(w, e)
            return tb.read_out(w, tb.rmsnorm(w, "final_norm", tb.stack(w, "coda", e, LLAMA)))

        return whole

    by_root = reference(lambda w, x: x * 32**0.5)
    check(make(house(embedding="scale")), by_root)
    check(make(house(embedding={"kind": "scale", "factor": 3.0})), reference(lambda w, x: 3 * x))
    check(make(house(embedding="norm")), reference(lambda w, x: tb.rmsnorm(w, "embedding", x)))
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(embedding={"kind": "scale", "factor": 3.0})), by_root)


# -- sharing ----------------------------------------------------------------------------------------------------------


def test_untied_loops_are_a_deeper_model() -> None:
    def step(w: tb.Weights, h: Tensor, e: Tensor, r: int) -> Tensor:
        return tb.stack(w, f"core.stacks.{r}", h, LLAMA)

    check(make(house(sharing="untied")), loop(step))
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(sharing="untied")), loop(lambda w, h, e, r: step(w, h, e, 0)))


def test_lora_loops_add_a_term_of_low_rank() -> None:
    def merged(w: tb.Weights, r: int) -> tb.Weights:
        """Weights of loop r, with B_r A_r in them."""
        plain = {k: p for k, p in w.items() if not k.endswith((".down", ".up"))}
        for name in [k.removesuffix(".down") for k in w if k.endswith(".down")]:
            plain[f"{name}.weight"] = w[f"{name}.weight"] + w[f"{name}.up"][r] @ w[f"{name}.down"][r]
        return plain

    reference = loop(lambda w, h, e, r: core(merged(w, r), h))
    check(make(house(sharing={"kind": "lora", "rank": 3})), reference)
    with pytest.raises(AssertionError, match="inference"):
        check(make(house(sharing="lora")), loop(lambda w, h, e, r: core(merged(w, 0), h)))


def test_an_adapter_is_one_term_for_all_loops_and_merges_into_the_weights() -> None:
    model = make(house(sharing={"kind": "adapter", "rank": 3}))
    plain = merge.merged(model)
    assert plain.config == house() and not any(name.endswith((".down", ".up")) for name, _ in plain.named_parameters())
    ids_BT = tokens(B, T)
    with torch.no_grad():
        for n_loops in (1, 2, 5):
            torch.testing.assert_close(plain(ids_BT, n_loops), model(ids_BT, n_loops), rtol=0, atol=1e-10)
        # The control: without its term the model is another one.
        weights = {k: v for k, v in model.state_dict().items() if not k.endswith((".down", ".up"))}
        plain.load_state_dict(weights)
        assert (plain(ids_BT, 2) - model(ids_BT, 2)).abs().max() > 1e-3
    assert merge.merged(plain) is plain


def test_lora_starts_as_a_tied_loop() -> None:
    lora = RecurrentLM(house(sharing="lora")).double().init(0).eval()
    tied = RecurrentLM(house()).double().eval()
    tied.load_state_dict({k: v for k, v in lora.state_dict().items() if not k.endswith((".down", ".up"))})
    with torch.no_grad():
        assert torch.equal(lora(tokens(B, T), 3), tied(tokens(B, T), 3))


def test_threads_may_be_at_different_loops_of_one_lora_model() -> None:
    """Two passes in step, each at another loop: neither takes the other's term."""
    model, ids_BT = make(house(sharing="lora")), tokens(B, T)
    with torch.no_grad():
        expected = [model(ids_BT, n) for n in (1, 2, 3)]
        passes = [model.readouts(ids_BT, [1, 2, 3]), model.readouts(ids_BT, [1, 2, 3])]
        steps = [next(passes[0]), next(passes[0]), next(passes[1]), next(passes[0]), next(passes[1])]
    for readout, n in zip(steps, (1, 2, 1, 3, 2), strict=True):
        assert torch.equal(model.logits(readout.y_BTD), expected[n - 1])
    first, second = model.core.at(0), model.core.at(1)
    assert first.layers[0].mlp.up.loop == 0 and second.layers[0].mlp.up.loop == 1
    assert first.layers[0].mlp.up.weight is second.layers[0].mlp.up.weight
    assert model.train().core.at(0).training and not model.eval().core.at(0).training


@pytest.mark.parametrize("sharing", ["lora", "untied"])
def test_loops_that_did_not_run_have_gradients_of_zero(sharing: str) -> None:
    model = make(house(sharing=sharing)).train()
    model(tokens(B, T), 1).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert not [name for name, grad in grads.items() if grad is None], "training in parallel would wait for these"
    idle = [grads[n] if sharing == "untied" else grads[n][1:] for n in grads if "stacks.1" in n or n.endswith(".up")]
    assert idle
    assert not any(grad.any() for grad in idle)


@pytest.mark.parametrize("fields", [{"sharing": "lora"}, {"sharing": "untied"}, {"route": "token_choice"}])
def test_no_loop_exists_beyond_those_with_weights(fields: dict[str, Any]) -> None:
    model = make(house(**fields))
    with pytest.raises(ValueError, match="has weights for n_loops=3 loops and no more"):
        model(tokens(B, T), 4)
    with pytest.raises(ValueError, match="rows would be at different loops"):
        model(tokens(B, T), 3, rows=[1, 3])


# -- a depth for each row ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, CART, {"inject": "diagonal", "state_init": "zeros"}, {"update": "gate", "position": "learned"}],
    ids=["plain", "cart", "parcae", "gate"],
)
def test_rows_of_their_own_depth_are_as_alone(fields: dict[str, Any]) -> None:
    model, ids_BT, rows = make(house(**fields)), tokens(4, T), [1, 4, 2, 4]
    with torch.no_grad():
        together = model(ids_BT, 4, rows=rows)
        for row, n in enumerate(rows):
            close(together[row], model(ids_BT[row : row + 1], n)[0], EXACT, f"row {row}")
        with pytest.raises(AssertionError, match="row 0"):
            close(together[0], model(ids_BT[:1], 2)[0], EXACT, "row 0")


@pytest.mark.parametrize("rows", [[1, 2], [1], [0, 3], [3, 4], [1, 3, 3]])
def test_rows_that_cannot_be_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must be 2 depths, one a row, from 1 to loops\[-1\]=3"):
        make(house())(tokens(2, T), 3, rows=rows)


def test_rows_that_idle_cost_nothing_and_end_with_gradients() -> None:
    """Shallow rows idle at the start: the last loops, which carry the gradients, are the last of every row."""
    model, ids_BT = make(house(inject="concat")).train(), tokens(2, T)
    rows: list[int] = []
    handle = model.core.stack.register_forward_hook(lambda module, args, out: rows.append(out[0].shape[0]))
    model(ids_BT, 4, rows=[1, 4])
    handle.remove()
    assert rows == [1, 1, 1, 2]

    def grads(logits: Tensor) -> list[Tensor]:
        model.zero_grad()
        logits.square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    together = grads(model(ids_BT, 4, n_free=3, rows=[1, 4]))
    alone = grads(model(ids_BT[:1], 1))
    other = grads(model(ids_BT[1:], 4, n_free=3))
    for a, b, c in zip(together, alone, other, strict=True):
        close(a, b + c, 1e-8, "gradients")


# -- anchor keys ------------------------------------------------------------------------------------------------------


def kept_bytes(config: ModelConfig, n_loops: int) -> int:
    store = KeyStore()
    with torch.no_grad():
        make(config)(tokens(1, T), n_loops, store=store)
    return store.n_bytes()


def test_the_cache_of_anchor_keys_does_not_grow_with_loops() -> None:
    anchor, per_loop = house(keys="anchor"), house()
    assert kept_bytes(anchor, 1) == kept_bytes(anchor, 8) == kept_bytes(per_loop, 1)
    assert kept_bytes(per_loop, 8) - kept_bytes(per_loop, 1) == 7 * 2 * T * 2 * 32 * 8


def test_anchors_are_the_prelude_s_and_nothing_else() -> None:
    """Whatever the loops do to the state, the core reads the same keys."""
    model = make(house(keys="anchor"))
    seen: list[Tensor] = []
    for attention in (block.attention for block in model.core.stack.layers):
        assert attention.keys is None
    model.keys.layers[0].register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        model(tokens(1, T), 6)
    assert len(seen) == 1

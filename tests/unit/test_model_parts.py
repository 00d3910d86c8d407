"""Parts of the model on their own: initial weights, rotary positions, the key store."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from alcoda.errors import UsageError
from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM
from alcoda.model.norms import FusedRMSNorm, RMSNorm
from alcoda.model.positions import Rope, rotate
from alcoda.model.shape import Cost, Shape, linear


def small(**fields: Any) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": 64, "seq_len": 16, "d_model": 64, "n_loops": 3, **fields})


# -- initial weights (the table of alcoda/model/init.py) -------------------------------------------------------------


def test_initial_weights_are_the_tables() -> None:
    block = {"norm": "layernorm", "bias": True}
    config = small(
        block=block, position="learned", head="untied", inject={"kind": "concat", "bias": True}, update="gate"
    )
    model = RecurrentLM(config).init(0)
    n_blocks_run = 1 + 2 * 3 + 1
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = 0.02
            if name.endswith(("attention.out", "mlp.down")):
                std /= math.sqrt(2 * n_blocks_run)
            n = module.weight.numel()
            # The error of a standard deviation of n draws is 1 / sqrt(2 n) of it; six of those.
            assert module.weight.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * n)), name
            if isinstance(module, nn.Linear) and module.bias is not None and name != "update.logit":
                assert not module.bias.any(), name
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all(), name
            assert module.bias is None or not module.bias.any(), name
    assert (model.update.logit.bias == 4.0).all()


def test_an_identity_adapter_passes_the_state_on() -> None:
    model = RecurrentLM(small(inject={"kind": "concat", "start": "identity"})).init(0)
    h, e = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    assert torch.equal(model.inject(h, e), h)


def test_the_seed_decides_every_weight_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(9)
    expected = torch.rand(1)
    torch.manual_seed(9)
    a, b, c = (RecurrentLM(small(inject="concat", update="gate")).init(seed) for seed in (0, 0, 1))
    torch.manual_seed(9)
    RecurrentLM.init(a, 0)
    assert torch.equal(torch.rand(1), expected)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q), name
        if p.dim() > 1:
            assert not torch.equal(p, r), name


def test_a_fresh_model_predicts_nothing_yet() -> None:
    model = RecurrentLM(small(inject="concat", update="gate")).init(0)
    ids = torch.arange(32).view(2, 16)
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(64), abs=0.2)


# -- positions --------------------------------------------------------------------------------------------------------


def test_rotary_products_depend_on_distance_alone() -> None:
    rope = Rope().build(Shape(32, 4, 8, 64, 16, 64, False))
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    pos = torch.tensor([0, 3, 100, 103, 5000, 5003])
    turned_q, turned_k = (rotate(x.expand(1, 1, 6, 8), rope.rotation(pos, torch.float64))[0, 0] for x in (q, k))
    products = (turned_q[1::2] * turned_k[0::2]).sum(-1)
    assert products.max() - products.min() < 1e-11
    assert turned_q.norm(dim=-1).allclose(q.norm().expand(6))
    assert torch.equal(turned_q[0], q)


def test_rotary_by_hand() -> None:
    # K = 4: dimensions (0, 2) turn by t radians, (1, 3) by t / 100.
    rope = Rope().build(Shape(4, 1, 4, 8, 16, 64, False))
    turned = rotate(torch.tensor([[[[1.0, 0.0, 0.0, 1.0]]]]).double(), rope.rotation(torch.tensor([2]), torch.float64))
    expected = [math.cos(2), -math.sin(0.02), math.sin(2), math.cos(0.02)]
    assert turned.flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_learned_positions_end_at_seq_len() -> None:
    config = small(position="learned")
    model = RecurrentLM(config).init(0)
    assert model(torch.zeros(1, 16, dtype=torch.long)).shape == (1, 16, 64)
    with pytest.raises(UsageError, match="17 tokens do not fit a context of seq_len=16 with learned positions"):
        model(torch.zeros(1, 17, dtype=torch.long))
    store = KeyStore()
    with torch.no_grad():
        model(torch.zeros(1, 16, dtype=torch.long), store=store)
        with pytest.raises(UsageError, match="17 tokens do not fit"):
            model(torch.zeros(1, 1, dtype=torch.long), store=store)
    small(position="rope").position.build(small().shape).check(10**6)  # no bound


# -- the key store ----------------------------------------------------------------------------------------------------


def test_the_plain_case_is_causal_and_has_no_mask() -> None:
    store, cpu = KeyStore(), torch.device("cpu")
    first = store.open(5, 1, None, None, cpu)
    assert (first.is_causal, first.mask) == (True, None)
    one = store.open(1, 1, None, None, cpu)
    assert (one.is_causal, one.mask, one.pos.tolist()) == (False, None, [5])
    chunk = store.open(2, 1, None, None, cpu)
    assert chunk.pos.tolist() == [6, 7]
    assert chunk.mask.tolist() == [[True] * 7 + [False], [True] * 8]


def test_retired_keys_by_hand() -> None:
    store, cpu = KeyStore(), torch.device("cpu")
    store.open(3, 1, None, None, cpu)
    again = store.open(1, 1, torch.tensor([[1]]), None, cpu)
    # Keys: 0, 1 (retired), 2, 1 (new). The query at 1 sees 0 and the new 1.
    assert again.mask.flatten().tolist() == [True, False, False, True]
    follows = store.open(1, 1, None, None, cpu)
    assert follows.pos.tolist() == [[3]]
    assert follows.mask.flatten().tolist() == [True, False, True, True, True]


def test_padding_retires_nothing() -> None:
    store, cpu = KeyStore(), torch.device("cpu")
    store.open(2, 1, None, None, cpu)
    store.open(1, 1, torch.tensor([[0]]), torch.tensor([[False]]), cpu)
    view = store.open(1, 1, None, None, cpu)
    assert view.pos.tolist() == [[2]]
    assert view.mask.flatten().tolist() == [True, True, False, True]


def test_buffers_grow_and_bytes_count_what_is_held() -> None:
    store, cpu = KeyStore(capacity_tokens=2), torch.device("cpu")
    held = []
    for n in (2, 1, 3):
        store.open(n, 1, None, None, cpu)
        k = torch.randn(1, 2, n, 4)
        held.append(k)
        keys, values = store.write(("core", 0, 0), k, -k)
        assert torch.equal(keys, torch.cat(held, 2))
        assert torch.equal(values, -keys)
    assert store.n_bytes() == 2 * 2 * 6 * 4 * 4


def test_cost_of_a_linear_map() -> None:
    assert linear(3, 5, True) == Cost(params=20, flops=30, sides=8)
    assert linear(3, 5, False) == Cost(params=15, flops=30, sides=8)


def test_fused_rmsnorm_is_rmsnorm_to_the_second_derivative() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64, generator=generator, requires_grad=True)

    def fused(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = FusedRMSNorm.apply(x, weight, 1e-6)
        assert isinstance(out, torch.Tensor)
        return out

    torch.testing.assert_close(fused(x, weight), torch.rms_norm(x, (8,), weight, 1e-6), atol=1e-14, rtol=0)
    assert torch.autograd.gradcheck(fused, (x, weight))
    assert torch.autograd.gradgradcheck(fused, (x, weight))


def test_training_on_a_cpu_takes_the_fused_rmsnorm_and_nothing_else_does() -> None:
    norm = RMSNorm().build(small().shape)
    x = torch.randn(2, 3, small().d_model, requires_grad=True)
    assert type(norm(x).grad_fn).__name__ == "FusedRMSNormBackward"
    with torch.no_grad():
        assert norm(x).grad_fn is None
    assert type(norm(x.detach()).grad_fn).__name__ != "FusedRMSNormBackward"

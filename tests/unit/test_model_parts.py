"""Parts of the model on their own: initial weights, rotary positions, the key store."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from alcoda.errors import UsageError
from alcoda.model.attention import Latent
from alcoda.model.blocks import Block, BlockConfig
from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore, Recall, open_context
from alcoda.model.lm import RecurrentLM
from alcoda.model.memory import Gated, Memory, NoMemory, PrevToken
from alcoda.model.norms import FusedRMSNorm, LayerNorm, RMSNorm
from alcoda.model.positions import Rope, rotate
from alcoda.model.shape import Cost, Place, Shape, linear, total
from alcoda.model.value_embed import Table
from alcoda.model.window import Pattern


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


def test_fused_rmsnorm_without_a_weight_is_the_one_with_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)

    def fused(x: torch.Tensor) -> torch.Tensor:
        out = FusedRMSNorm.apply(x, None, 1e-6)
        assert isinstance(out, torch.Tensor)
        return out

    torch.testing.assert_close(fused(x), torch.rms_norm(x, (8,), None, 1e-6), atol=1e-14, rtol=0)
    (plain,) = torch.autograd.grad(fused(x).square().sum(), x)
    (ones,) = torch.autograd.grad(FusedRMSNorm.apply(x, torch.ones(8, dtype=x.dtype), 1e-6).square().sum(), x)
    torch.testing.assert_close(plain, ones, atol=1e-13, rtol=0)
    assert torch.autograd.gradcheck(fused, (x,))
    assert torch.autograd.gradgradcheck(fused, (x,))


@pytest.mark.parametrize("weight", [True, False])
def test_training_on_a_cpu_takes_the_fused_rmsnorm_and_nothing_else_does(weight: bool) -> None:
    norm = RMSNorm(weight=weight).build(small().shape)
    x = torch.randn(2, 3, small().d_model, requires_grad=True)
    assert type(norm(x).grad_fn).__name__ == "FusedRMSNormBackward"
    with torch.no_grad():
        assert norm(x).grad_fn is None
    assert type(norm(x.detach()).grad_fn).__name__ != "FusedRMSNormBackward"


# -- costs of the parts of a block ------------------------------------------------------------------------------------

SHAPE = Shape(d_model=32, n_heads=4, d_head=12, d_ff=40, seq_len=48, vocab_size=64, bias=False)


def test_cost_of_a_norm_without_weight_is_nothing() -> None:
    for bias in (False, True):
        for norm in (RMSNorm(weight=False), LayerNorm(weight=False)):
            assert norm.cost(SHAPE._replace(bias=bias)) == Cost()


def test_cost_of_latent_keys_by_hand() -> None:
    # c: 32 -> 8; k and v: 8 -> 4 heads of 12.
    assert Latent().key_cost(SHAPE) == Cost(
        params=32 * 8 + 2 * 8 * 48, flops=2 * (32 * 8 + 2 * 8 * 48), kv=96, latent=8, sides=40 + 2 * 56
    )
    assert Latent(latent=5).key_cost(SHAPE).latent == 5
    assert Latent().latent_width(3) == 1


def test_cost_of_a_value_table_by_hand() -> None:
    table = Table(gate_channels=7)
    assert table.cost(SHAPE, 2, Place(3, 4)) == Cost(params=64 * 2 * 12 + 7 * 2, flops=2 * 7 * 2, sides=9)
    assert table.cost(SHAPE, 2, Place(2, 4)) == Cost()
    assert Table(gate=False).cost(SHAPE, 2, Place(3, 4)) == Cost(params=64 * 2 * 12)


@pytest.mark.parametrize(
    "memory", [NoMemory(), Gated(), PrevToken(beta=0.1), PrevToken(share="per_layer", gates=False)]
)
@pytest.mark.parametrize("kind", ["none", "before_rope", "after_rope"])
@pytest.mark.parametrize("attention", [{"kind": "mha"}, {"kind": "gqa", "n_kv_heads": 2}, {"kind": "mla"}])
def test_costs_of_keys_and_of_a_block_count_what_is_built(attention: dict[str, Any], kind: str, memory: Memory) -> None:
    """Keys are costed apart from queries, because the core may read frozen ones of the prelude's output."""
    block = BlockConfig.model_validate(
        {"attention": {**attention, "qk_norm": kind, "qk_bias": True}, "value_embed": {"kind": "table", "every": 1}}
    )
    for place in (Place(1, 4), Place(1, 4, own_keys=False)):
        built = Block(block, SHAPE, place, memory)
        assert total(*block.cost(SHAPE, place, memory).values()).params == sum(p.numel() for p in built.parameters())
        sides = sum(m.in_features + m.out_features for m in built.modules() if isinstance(m, nn.Linear))
        assert total(*block.cost(SHAPE, place, memory).values()).sides == sides
    keys = block.build_keys(SHAPE, place, memory)
    cost = block.key_cost(SHAPE, place, memory)
    assert cost.params == sum(p.numel() for p in keys.parameters())
    assert cost.sides == sum(m.in_features + m.out_features for m in keys.modules() if isinstance(m, nn.Linear))
    m_BTD, ids_BT = torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.long)
    context = open_context(ids_BT, 1, Rope().build(SHAPE), (), torch.float32)
    shared = tuple(torch.randn(2, 5, block.d_kv(SHAPE)) for _ in range(2))
    k, v = keys(
        torch.randn(2, 5, 32), None, replace(context, recall=Recall(m_BTD, m_BTD, shared) if memory.carries else None)
    )
    assert cost.kv == (k.numel() + v.numel()) // 10


# -- windows ----------------------------------------------------------------------------------------------------------


def test_windows_by_layer() -> None:
    def sizes(n_layers: int, **fields: Any) -> list[int | None]:
        window = Pattern(tokens=9, **fields)
        return [window.at(Place(layer, n_layers)) for layer in range(n_layers)]

    assert sizes(9) == [9, 9, 9, None, 9, 9, 9, None, None]
    assert sizes(4, pattern="LS") == [None, 9, None, None]
    assert sizes(3, pattern="S") == [9, 9, None]
    assert sizes(1) == [None]
    assert BlockConfig(window=Pattern(tokens=9)).windows() == (9,)
    assert BlockConfig().windows() == ()


def test_frozen_keys_are_read_through_the_window() -> None:
    """A layer without keys of its own looks at the frozen ones through its window."""
    block = BlockConfig(window=Pattern(tokens=3, pattern="SL"))
    place = Place(2, 4, own_keys=False)
    keys, layer = block.build_keys(SHAPE, place, NoMemory()).double(), Block(block, SHAPE, place, NoMemory()).double()
    e_BTD, ids_BT = torch.randn(1, 8, 32, dtype=torch.float64), torch.zeros(1, 8, dtype=torch.long)
    position = Rope().build(SHAPE)
    context = open_context(ids_BT, 1, position, block.windows(), torch.float64)

    def last(e_BTD: torch.Tensor) -> torch.Tensor:
        frozen = keys(e_BTD, context.rotation, context)
        return layer(x_BTD, replace(context, frozen=(frozen,)), "core", 0)[0, -1]

    x_BTD = torch.randn(1, 8, 32, dtype=torch.float64)
    for pos in range(8):
        changed = e_BTD.clone()
        changed[0, pos] += 1
        assert torch.equal(last(changed), last(e_BTD)) is (pos < 5)


def test_a_parameter_that_nothing_fills_is_refused() -> None:
    """It would be what the memory held, and another model each time."""
    model = RecurrentLM(small())
    model.update.scale = torch.nn.Parameter(torch.empty(4))
    with pytest.raises(TypeError, match=r"nothing fills the parameter update.scale: let OverwriteModule be an .*Init"):
        model.init(0)

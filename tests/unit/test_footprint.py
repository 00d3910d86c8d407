"""The footprint: what is exact, what autograd keeps against what it saves, times, refusals."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import alcoda
from alcoda.depth.plan import LoopPlan
from alcoda.errors import UsageError
from alcoda.model import attention
from alcoda.model.lm import RecurrentLM
from alcoda.training import activations, checkpoint, footprint
from alcoda.training.device import autocast
from alcoda.training.passes import step_loss
from alcoda.training.recipe import Recipe, load_recipe
from alcoda.training.trainable import mark

RECIPES = Path(__file__).parents[2] / "recipes"
CPU = torch.device("cpu")
SMALL = ("model.d_model=128", "model.seq_len=96", "model.vocab_size=512", "train.batch_size=3", "train.device=cpu")
"""288 tokens: no size of a weight, which may be seen among activations."""
WORDS = "model.vocab_size=4096"
"""The loss, not the loop, is then what needs most."""
WITHIN = 0.05
"""How far the estimate of what is kept may be from what autograd saves."""
OF_MEMORY = 0.02
"""And that of a model with a memory: keys of an earlier pass are a small part, and must be seen."""


def small(name: str, *settings: str) -> Recipe:
    return load_recipe(RECIPES / f"mini/{name}.yaml", [*SMALL, *settings])


def loss_of(recipe: Recipe, model: RecurrentLM, ids: torch.Tensor, plan: LoopPlan, recompute: bool) -> torch.Tensor:
    scored_T = [len(ids)] * ids.size(1)
    return step_loss(recipe.objective, recipe.resolved().passes, model, ids, ids, scored_T, plan, recompute)


def term(found: footprint.Footprint, *names: str) -> int:
    """The bytes of the terms with these names, at the mean depth."""
    return sum(t.bytes for t in found.memory if t.name in names)


# -- what is exact ----------------------------------------------------------------------------------------------------


def stepped(recipe: Recipe) -> tuple[RecurrentLM, list[torch.optim.Optimizer]]:
    """A model and its optimizers after one step."""
    model = checkpoint.build(recipe.model, CPU).init(0)
    mark(model, recipe.trainable)
    optimizers = recipe.train.optimizer.build(model)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.zeros_like(p)
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def tensor_bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("name", ["dense", "grt", "cart", "rrt", "ouro", "mor"])
@pytest.mark.parametrize("settings", [(), ("train.optimizer={kind: muon}",), ("trainable=[core]",)], ids=str)
def test_weights_gradients_and_optimizer_state_are_those_of_a_step(name: str, settings: Sequence[str]) -> None:
    recipe = small(name, *(one for one in settings if name != "dense" or "core" not in one))
    model, optimizers = stepped(recipe)
    found = footprint.footprint(recipe)
    states = [t for o in optimizers for state in o.state.values() for t in state.values() if torch.is_tensor(t)]
    assert term(found, "weights") == tensor_bytes(model.parameters())
    assert term(found, "weights") == 4 * recipe.ledger().params
    assert term(found, "gradients") == tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
    assert term(found, "optimizer") == tensor_bytes(states)


def test_muon_keeps_less() -> None:
    adamw, muon = (footprint.footprint(small("grt", f"train.optimizer={{kind: {k}}}")) for k in ("adamw", "muon"))
    assert term(muon, "optimizer") < 0.75 * term(adamw, "optimizer")


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_fsdp_splits_by_rows(ranks: int) -> None:
    recipe = small("grt", "train.batch_size=6")
    found = footprint.footprint(recipe, ranks, "fsdp")
    model = checkpoint.build(recipe.model, torch.device("meta"))
    shards = sum(len(p.chunk(ranks)[0].flatten()) for p in model.parameters())
    padded = sum(math.ceil(p.size(0) / ranks) * ranks * p[0].numel() for p in model.parameters())
    blocks = sum(p.numel() for s in (model.prelude, model.coda) for p in s.parameters())
    n_params = sum(p.numel() for p in model.parameters())
    assert term(found, "weights") == term(found, "gradients") == 4 * shards
    assert term(found, "optimizer") == 8 * shards + 4 * len(list(model.parameters()))
    # One prelude and one coda block: the two that are gathered at a time are all there are.
    assert term(found, "weights.gathered") == 4 * n_params
    sent = {t.name: t.bytes for t in found.traffic}
    assert sent["reduce_scatter"] == pytest.approx(4 * padded * (ranks - 1) / ranks, abs=2)
    assert sent["all_gather"] >= 4 * (n_params + blocks) * (ranks - 1) / ranks
    again = footprint.footprint(load_recipe_with(recipe, micro_batches=6 // ranks), ranks, "fsdp")
    assert {t.name: t.bytes for t in again.traffic}["all_gather"] == 6 // ranks * sent["all_gather"]
    muon = {t.name: t.bytes for t in footprint.footprint(small("grt", *muon_of(6)), ranks, "fsdp").traffic}
    assert 0 < muon["all_gather"] - sent["all_gather"] < sent["reduce_scatter"] == muon["reduce_scatter"]


def test_the_recipe_says_how_ranks_share() -> None:
    own = {kind: small("grt", "train.batch_size=4", f"parallel={kind}") for kind in ("ddp", "fsdp")}
    for kind, recipe in own.items():
        assert footprint.footprint(recipe, 2) == footprint.footprint(own["ddp"], 2, kind)
        assert footprint.footprint(recipe, 2).parallel == kind
    held = small("grt", "train.batch_size=4", "parallel={kind: fsdp, reshard_after_forward: false}")
    model = checkpoint.build(held.model, torch.device("meta"))
    blocks = sum(p.numel() for stack in (model.prelude, model.coda) for p in stack.parameters())
    sent = [{t.name: t.bytes for t in footprint.footprint(r, 2, "fsdp").traffic} for r in (own["fsdp"], held)]
    assert sent[0]["all_gather"] - sent[1]["all_gather"] == 4 * blocks / 2
    assert sent[0]["reduce_scatter"] == sent[1]["reduce_scatter"]


def test_fsdp_holds_what_runs_several_times() -> None:
    """All of a model with a memory, gathered once a micro-batch; of three blocks otherwise only two at a time."""
    how = ("model.n_prelude=3", "train.batch_size=4", "parallel=fsdp")
    memory, plain = small("lrt_elastic", *how), small("elastic", *how)
    n_params = sum(p.numel() for p in checkpoint.build(memory.model, torch.device("meta")).parameters())
    found = footprint.footprint(memory, 2)
    assert term(found, "weights.gathered") == 4 * n_params
    assert {t.name: t.bytes for t in found.traffic}["all_gather"] == pytest.approx(4 * n_params / 2, rel=0.001)
    assert term(footprint.footprint(plain, 2), "weights.gathered") < 4 * plain.ledger().params
    let_go = small("elastic", *how, "parallel={kind: fsdp, reshard_after_forward: false}")
    assert term(footprint.footprint(let_go, 2), "weights.gathered") == 4 * plain.ledger().params


def muon_of(batch_size: int) -> tuple[str, ...]:
    return f"train.batch_size={batch_size}", "train.optimizer={kind: muon}"


def load_recipe_with(recipe: Recipe, **train: Any) -> Recipe:
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=train)})


def test_ddp_sends_gradients_twice_and_one_rank_nothing() -> None:
    recipe = small("grt", "trainable=[core]", "train.batch_size=4")
    learnt = sum(t.params for t in recipe.ledger().terms if t.name.startswith("core."))
    (sent,) = footprint.footprint(recipe, 4).traffic
    assert (sent.name, sent.bytes) == ("all_reduce", 2 * 4 * learnt * 3 / 4)
    alone = footprint.footprint(recipe)
    assert alone.traffic == () and alone.parallel == "none" and alone.communication_s == 0


# -- what autograd keeps ----------------------------------------------------------------------------------------------


def saved_bytes(recipe: Recipe, n_loops: int, n_grad: int, of_weights: bool = False) -> int:
    """Bytes of the storages that autograd saves in one pass, without parameters and their copies; or of those."""
    model = checkpoint.build(recipe.model, CPU).init(0).train()
    dtype = torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {s for p in model.parameters() if p.dim() == 2 for s in (tuple(p.shape), tuple(p.shape)[::-1])}
    saved: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        pointer = x.untyped_storage().data_ptr()
        if pointer not in weights and (tuple(x.shape) in shapes) == of_weights:
            saved.setdefault(pointer, x.detach())  # held, so that no other takes its place
        return x.detach()  # not x: a node that keeps its own output would keep itself

    ids = torch.randint(0, recipe.model.vocab_size, (recipe.train.batch_size, recipe.model.seq_len))
    plan = LoopPlan(n_loops - n_grad, n_grad, None, 0.3)
    with autocast(CPU, dtype), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss_of(recipe, model, ids, plan, False)
    return sum(x.untyped_storage().nbytes() for x in saved.values())


def estimated_bytes(recipe: Recipe, n_loops: int) -> int:
    found = footprint.footprint(load_fixed(recipe, n_loops))
    return sum(t.bytes for t in found.memory if t.name.startswith("activations.")) + term(found, "logits")


def load_fixed(recipe: Recipe, n_loops: int) -> Recipe:
    """At one depth, of which the same loops have gradients."""
    depth = {"kind": "fixed", "loops": n_loops, "last_k": recipe.depth.last_k}
    return recipe.model_copy(update={"depth": depth})


DESIGNS: dict[str, tuple[str, ...]] = {
    "dense": ("dense",),
    "grt": ("grt",),
    "elastic": ("elastic",),
    "cart": ("cart",),
    "mor": ("mor",),
    "huginn": ("huginn",),
    "ouro": ("ouro",),
    "parcae": ("parcae",),
    "rrt": ("rrt",),
    "untied": ("grt", "model.sharing=untied", "model.head=untied", "eval.loops=[]"),
    "gelu": ("grt", "model.block.norm=layernorm", "model.block.mlp=gelu", "model.position=learned"),
    "on_branch": ("grt", "model.block.sandwich=on_branch", "model.loop_norm=every_loop"),
    "qk_norm": ("elastic", "model.block.attention.qk_norm=before_rope", "model.inject=add"),
    "values": ("dense", "model.block.value_embed=table", "model.block.mlp=relu2", "model.soft_cap=tanh"),
    "distil": ("grt", "objective=self_distill", "model.vocab_size=2048"),
    "memory": ("lrt_dense",),
    "memory in the loop": ("lrt_elastic",),
    "per layer": ("lrt_dense", "model.memory={kind: prev_token, share: per_layer, beta: 0.1}"),
    "no gates": ("lrt_elastic", "model.memory={kind: prev_token, source: final, gates: false}"),
    "only keys": ("lrt_dense", "model.memory={kind: prev_token, residual: false, mean_of: 2}"),
    "gated": ("lrt_dense", "model.memory=gated", "passes=one"),
    "chunked": ("lrt_dense", "passes={kind: chunked, tokens: 32}"),
    "refined": ("lrt_elastic", "passes={kind: refined, passes: 2}"),
    "anchor memory": ("cart", "model.memory=prev_token", "passes={kind: interleaved, subsets: 3}"),
    "no norm": ("huginn", "model.block.sandwich=none", "model.embedding=norm"),
}


@pytest.mark.parametrize(("dtype", "kernel"), [("float32", "explicit"), ("float32", "fused"), ("bfloat16", "fused")])
@pytest.mark.parametrize("design", DESIGNS)
def test_kept_bytes_are_what_autograd_saves(
    design: str, dtype: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, activations):
        monkeypatch.setattr(module, "EXPLICIT_MAX_TOKENS", 512 if kernel == "explicit" else 0)
    recipe = small(DESIGNS[design][0], *DESIGNS[design][1:], f"train.dtype={dtype}")
    n_loops = recipe.model.n_loops
    n_grad = min(n_loops, recipe.depth.last_k or n_loops)
    found, saved = estimated_bytes(recipe, n_loops), saved_bytes(recipe, n_loops, n_grad)
    assert found == pytest.approx(saved, rel=OF_MEMORY if recipe.model.memory.carries else WITHIN)
    if recipe.model.is_recurrent and recipe.depth.last_k is None:  # control: one loop less is seen
        assert found != pytest.approx(saved_bytes(recipe, n_loops - 1, n_grad - 1), rel=WITHIN)


def test_masks_of_tokens_are_not_counted() -> None:
    """Token choice gives the kernel a mask, which it keeps: the bound that the page states for it."""
    recipe = small("mor_token_choice")
    assert estimated_bytes(recipe, 3) == pytest.approx(saved_bytes(recipe, 3, 3), rel=0.25)


def test_a_memory_on_a_route_is_counted_without_its_gaps() -> None:
    """Keys of tokens that a loop leaves out are held as zeros: the bound that the page states for it."""
    recipe = small("mor", "model.memory=prev_token")
    found, saved = estimated_bytes(recipe, 3), saved_bytes(recipe, 3, 3)
    assert found == pytest.approx(saved, rel=0.1)


def test_keys_of_the_pass_before_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an estimate in which a pass holds its own keys only is off by more than the bound."""
    recipe = small("lrt_dense", "train.dtype=float32")
    assert [(one.tokens, one.keys) for one in activations.runs(recipe)] == [(96, 96), (48, 96), (48, 96)]
    own = [one._replace(keys=one.tokens) for one in activations.runs(recipe)]
    monkeypatch.setattr(activations, "runs", lambda recipe: own)
    assert estimated_bytes(recipe, 1) != pytest.approx(saved_bytes(recipe, 1, 1), rel=OF_MEMORY)


@pytest.mark.parametrize("name", ["dense", "grt", "cart", "ouro", "rrt", "lrt"])
def test_copies_of_weights(name: str) -> None:
    """In bf16 for autocast; and those that each loop makes (rrt), in each pass (lrt), also without."""
    lrt = ("rrt", "model.memory=prev_token")
    bf16, fp32 = (
        small(*(lrt if name == "lrt" else (name,)), f"train.dtype={dtype}") for dtype in ("bfloat16", "float32")
    )
    n_loops = bf16.model.n_loops
    copies = term(footprint.footprint(bf16), "weights.autocast", "weights.of_loops")
    assert copies == pytest.approx(saved_bytes(bf16, n_loops, n_loops, True), rel=0.01)
    merged = term(footprint.footprint(fp32), "weights.autocast", "weights.of_loops")
    assert merged == pytest.approx(saved_bytes(fp32, n_loops, n_loops, True), rel=0.01, abs=10_000)
    assert (merged > 0) == (name in ("rrt", "lrt"))


def test_a_gpu_keeps_norms_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast on a GPU has norms in fp32; here by hand, the rest being the CPU's."""
    from alcoda.model.norms import FusedRMSNorm, RMSNormModule

    def in_fp32(self: RMSNormModule, x: torch.Tensor) -> torch.Tensor:
        return FusedRMSNorm.apply(x.float(), self.weight, self.eps)

    monkeypatch.setattr(RMSNormModule, "forward", in_fp32)
    monkeypatch.setattr(attention, "EXPLICIT_MAX_TOKENS", 0)
    for name in ("grt", "elastic", "huginn", "ouro"):
        recipe = small(name, "train.dtype=bfloat16", "train.device=auto")
        n_loops = recipe.model.n_loops
        n_grad = min(n_loops, recipe.depth.last_k or n_loops)
        assert estimated_bytes(recipe, n_loops) == pytest.approx(saved_bytes(recipe, n_loops, n_grad), rel=WITHIN)


def test_recompute_keeps_a_state_a_loop_and_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_fixed(small("grt", "train.dtype=float32", "model.vocab_size=64"), 4)
    whole, again = (footprint.footprint(load_recipe_with(recipe, recompute=on)) for on in (False, True))
    parts = ("activations.inject", "activations.core", "activations.update")
    assert 4 * term(again, *parts) == term(whole, *parts)
    states: list[torch.Tensor] = []
    run = RecurrentLM.run_loop
    monkeypatch.setattr(RecurrentLM, "run_loop", lambda self, *args: states.append(args[0].h_BTD) or run(self, *args))
    model = checkpoint.build(recipe.model, CPU).init(0).train()
    ids = torch.zeros(3, 96, dtype=torch.long)
    loss_of(recipe, model, ids, LoopPlan(0, 4), True)
    assert term(again, "activations.states") == tensor_bytes(states)


class Living(TorchDispatchMode):
    """Counts the bytes of all storages that live: now, and at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.sizes: dict[int, int] = {}

    def add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.add(x)
        return out


def most_bytes(recipe: Recipe, n_loops: int, n_grad: int) -> int:
    """The most that lives at once in a later micro-batch: there are gradients, and the optimizer has its state."""
    model, optimizers = stepped(recipe)
    ids = torch.zeros(3, 96, dtype=torch.long)
    dtype = torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32
    with Living() as living:
        for p in model.train().parameters():
            assert p.grad is not None
            for x in (p, p.grad, *(x for o in optimizers for x in o.state[p].values())):
                living.add(x)
        with autocast(CPU, dtype):
            plan = LoopPlan(n_loops - n_grad, n_grad)
            loss = loss_of(recipe, model, ids, plan, recipe.train.recompute)
        loss.backward()
    return living.most


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "design",
    [
        ("grt",),
        ("huginn", "model.n_core=3"),
        ("ouro",),
        ("grt", WORDS),
        ("lrt_elastic", "model.n_core=3"),
        ("lrt_elastic", "passes={kind: chunked, tokens: 48}"),
    ],
    ids=str,
)
def test_the_total_is_the_most_that_lives_at_once(design: tuple[str, ...], recompute: bool) -> None:
    recipe = small(design[0], *design[1:], "train.dtype=bfloat16", f"train.recompute={str(recompute).lower()}")
    n_loops = recipe.model.n_loops
    found = footprint.footprint(load_fixed(recipe, n_loops)).memory_bytes
    # Below: the gradients of the block that is being differentiated are not counted.
    assert 0.9 < found / most_bytes(recipe, n_loops, min(n_loops, recipe.depth.last_k or n_loops)) < 1.05


def test_depths() -> None:
    """At the mean and at the most; of truncated backpropagation only what carries gradients."""
    uniform = footprint.footprint(small("grt"))
    per_loop = term(footprint.footprint(load_fixed(small("grt"), 1)), "activations.core")
    assert term(uniform, "activations.core") == 2.5 * per_loop
    assert next(t for t in uniform.memory if t.name == "activations.core").bytes_at_max == 4 * per_loop
    assert uniform.memory_bytes < uniform.memory_bytes_at_max
    huginn = small("huginn")
    found = next(t for t in footprint.footprint(huginn).memory if t.name == "activations.core")
    assert found.bytes_at_max == 2 * term(footprint.footprint(load_fixed(huginn, 1)), "activations.core")
    parts = footprint.footprint(small("grt", "train.micro_batches=3"))
    assert 3 * term(parts, "activations.core") == term(uniform, "activations.core") and parts.rows == 1


# -- time, and what is refused ----------------------------------------------------------------------------------------


def test_time_is_work_over_speed() -> None:
    recipe = small("grt", "train.batch_size=4", "train.steps=10")
    found = alcoda.footprint(recipe, 2, peak_tflops=100, utilisation=0.5, bandwidth_gbps=8)
    flops = recipe.ledger().training_flops_per_token * 4 * 96
    assert found.flops == flops
    assert found.compute_s == flops / (2 * 100e12 * 0.5)
    assert found.communication_s == found.traffic_bytes / 1e9
    assert found.step_s == found.compute_s + found.communication_s and found.run_s == 10 * found.step_s
    for half in ({"peak_tflops": 100}, {"bandwidth_gbps": 8}):
        assert alcoda.footprint(recipe, 2, **half).run_s is None
    assert found.to_json()["memory_bytes"] == found.memory_bytes == sum(t["bytes"] for t in found.to_json()["memory"])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ranks": 0}, "ranks=0: a whole number of 1 or more"),
        ({"ranks": True}, "ranks=True: a whole number"),
        ({"ranks": 5}, "ranks=5 must divide train.batch_size=16, the rows of all ranks together: one of 1, 2, 4, 8"),
        ({"ranks": 16, "parts": 2}, "train.micro_batches=2 must divide the 1 rows of each of 16 ranks"),
        ({"parallel": "fspd"}, "did you mean 'fsdp'"),
        ({"peak_tflops": 0.0}, "peak_tflops=0.0: a number above 0"),
        ({"bandwidth_gbps": math.inf}, "bandwidth_gbps=inf: a number above 0"),
        ({"utilisation": 1.5}, "utilisation=1.5: the share of the peak"),
        ({"utilisation": math.nan}, "utilisation=nan: the share of the peak"),
    ],
)
def test_nonsense_is_refused(how: dict[str, Any], says: str) -> None:
    parts = how.pop("parts", 1)
    recipe = load_recipe(RECIPES / "mini/grt.yaml", [f"train.micro_batches={parts}"])
    with pytest.raises(UsageError) as refused:
        footprint.footprint(recipe, **how)
    assert says in str(refused.value)

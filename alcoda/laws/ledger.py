"""Law 6: what the ledger says is what is there: parameters, FLOPs, bytes of keys. Configs and weights survive round
trips.

FLOPs are counted by `torch.utils.flop_counter` on the meta device, where attention is one operation of a known price
(a CPU kernel of it is not counted) and the ledger's convention is the counter's: 2 a multiply-add, scores over all
``seq_len`` keys, nothing for elementwise work. Passes are in training mode, so that noise needs no values.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from alcoda.laws.law import Place, close_logits, each, require
from alcoda.laws.subject import Subject, at_most, depths, make, reminded, tokens
from alcoda.model.cache_policy import caches
from alcoda.model.config import ModelConfig
from alcoda.model.cost import KV_ITEM_BYTES, Term, TrainingDepth
from alcoda.model.cost import ledger as ledger_of
from alcoda.model.keys import KeyStore
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader
from alcoda.training import checkpoint

B = 2
LOOSE = ("head", "route")


def on_meta(config: ModelConfig) -> RecurrentLM:
    """A model without values."""
    with torch.device("meta"):
        return RecurrentLM(config).train()


def count_flops(
    config: ModelConfig, n_loops: int, backward: bool, n_free: int = 0, recompute: bool = False
) -> FlopCounterMode:
    """The counter, after a pass over ``B`` rows of a full context."""
    model = on_meta(config)
    ids_BT = torch.zeros(B, config.seq_len, dtype=torch.long, device="meta")
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        # As in every pass but the first of training, which has no memories.
        memory_BTD = torch.zeros(*ids_BT.shape, config.d_model, requires_grad=backward)
        if backward:
            how = {"n_free": n_free, "recompute": recompute, "memory_BTD": memory_BTD}
            readout = next(model.readouts(ids_BT, [n_loops], **how))
            loss = model.logits(readout.y_BTD).sum()
            if config.exit_gate.has_gate:  # training asks it, a plain forward pass does not
                loss = loss + model.exit_gate(readout.state.h_BTD).sum()
            loss.backward()
        else:
            model(
                ids_BT, n_loops, memory_BTD=memory_BTD
            )  # called as a module, so that the counter knows its parts by name
    return counter


def counted_flops(config: ModelConfig, n_loops: int, backward: bool, n_free: int = 0, recompute: bool = False) -> float:
    """A token, of a full context."""
    counter = count_flops(config, n_loops, backward, n_free, recompute)
    return counter.get_total_flops() / (B * config.seq_len)


# -- parameters -------------------------------------------------------------------------------------------------------


def check_params(config: ModelConfig) -> None:
    """In all, and of each part. A tied head has no parameters of its own."""
    model, terms = on_meta(config), ledger_of(config).terms
    wrong: list[Place] = []
    for name, part in model.named_children():
        said = sum(t.params for t in terms if t.name.split(".")[0] == name)
        wrong += [name] if said != sum(p.numel() for p in part.parameters()) else []
    said, there = sum(t.params for t in terms), sum(p.numel() for p in model.parameters())
    require(said == there, f"parameters: the ledger says {said:,}, the model has {there:,}", wrong)
    require(not wrong, f"parameters of {', '.join(map(str, wrong))} are not what the ledger says", wrong)


def params(subject: Subject) -> None:
    """On the meta device."""
    check_params(subject.config)


# -- FLOPs ------------------------------------------------------------------------------------------------------------


def check_forward_flops(config: ModelConfig, n_loops: int) -> None:
    """In all; the parts that are off are named."""
    found, counter = ledger_of(config, n_loops), count_flops(config, n_loops, False)
    counted = counter.get_total_flops() / (B * config.seq_len)
    said = found.forward_flops_per_token
    if not _equal(said, counted):
        wrong = _parts_off(found.terms, counter, B * config.seq_len)
        require(False, f"forward FLOPs: the ledger says {said:,}, the counter {counted:,.10g}", wrong)


def _equal(said: float, counted: float) -> bool:
    # Shares of a route are fractions, which a float rounds.
    return math.isclose(said, counted, rel_tol=1e-12)


def _parts_off(terms: Sequence[Term], counter: FlopCounterMode, n_tokens: int) -> list[Place]:
    counts = {
        name.partition(".")[2]: sum(by_op.values()) / n_tokens for name, by_op in counter.get_flop_counts().items()
    }
    counted: dict[str, float] = {}
    for name, flops in counts.items():
        part = name.split(".")[0]
        # A stack is called and its sharing is not: the outermost module that was. The route calls the others.
        if name and part != "route" and not any(name.startswith(f"{other}.") for other in counts if other):
            counted[part] = counted.get(part, 0) + flops
    said: dict[str, float] = {}
    for term in terms:
        part = term.name.split(".")[0]
        said[part] = said.get(part, 0) + term.forward_flops
    wrong: list[Place] = [part for part, flops in counted.items() if not _equal(said.get(part, 0), flops)]
    wrong += [part for part, flops in said.items() if flops and part not in (*counted, *LOOSE)]
    # What is in no module of its own: the head's product, and the route's beside what it calls.
    rest = counter.get_total_flops() / n_tokens - sum(counted.values())
    if not math.isclose(sum(said.get(part, 0) for part in LOOSE), rest, abs_tol=1e-6):
        wrong += [part for part in LOOSE if said.get(part, 0)]
    return wrong


def forward_flops(subject: Subject) -> None:
    """At one loop and at two."""
    each((f"{n} loops", lambda n=n: check_forward_flops(subject.config, n)) for n in depths(subject.config, (1, 2)))


def starts_without_gradient(config: ModelConfig) -> bool:
    """Whether the first loop with gradients begins with a product whose input has none, as a router's, or a map's
    behind a norm without weight. The ledger counts the gradient that it need not hand on."""
    bare = not config.inject.carries_anchor and not config.block.norm.cost(config.shape).params
    return bare or config.route.loop_flops(config.shape) > 0


def check_training_flops(config: ModelConfig, n_loops: int, n_free: int = 0, recompute: bool = False) -> None:
    """Recomputed to the end of each loop: torch would stop before a last product that no gradient needs."""
    depth = TrainingDepth(n_loops, n_loops - n_free, recompute)
    said = ledger_of(config, n_loops, depth).training_flops_per_token
    with set_checkpoint_early_stop(False):
        counted = counted_flops(config, n_loops, True, n_free, recompute)
    holds = _equal(said, counted) or (starts_without_gradient(config) and counted < said < 1.01 * counted)
    require(holds, f"training FLOPs: the ledger says {said:,.10g}, the counter {counted:,.10g}")


def training_flops(subject: Subject) -> None:
    """A forward pass, a backward pass and a recomputed one of each term; one loop of two carries gradients."""
    config, n_loops = subject.config, at_most(subject.config, 2)
    n_free = 1 if n_loops > 1 and config.anchor_reaches_loop else 0
    check_training_flops(config, n_loops, n_free, recompute=config.is_recurrent)


def counted_by_chance(subject: Subject) -> str | None:
    """The exception of the laws on FLOPs: a route that itself says how many tokens run. (One that is not causal in
    training takes a share of them that is known.)"""
    route = subject.config.route
    if not (route.gathers and route.causal_in_training):
        return None
    return f"route {route.kind} says how many tokens run each loop; the ledger counts the share that it is balanced to"


# -- keys -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_kv_bytes(config: ModelConfig, n_loops: int) -> None:
    """What a store holds after a text in chunks."""
    model, ids_BT, store = make(config), tokens(1, 9), KeyStore()
    for chunk in ids_BT.split([5, 1, 1, 2], 1):
        model(chunk, n_loops, store=store)
    item_bytes = model.embed.weight.element_size()
    said = ledger_of(config, n_loops).kv_bytes_per_token * 9
    there = store.n_bytes() * KV_ITEM_BYTES / item_bytes
    # Tokens that a route lets out have no key: then the ledger says the most.
    holds = there <= said if config.route.gathers else there == said
    require(holds, f"KV bytes of 9 tokens: the ledger says {said:,}, the store holds {there:,.10g}")
    by_cache = ledger_of(config, n_loops).kv_bytes_by_cache
    require(by_cache["per_loop"] * 9 == said, "KV bytes of cache per_loop are not those of the ledger")
    for name, n_bytes in by_cache.items():
        if not (cache := caches()[name]).is_parallel:
            reader = Reader(model, n_loops, cache=cache)
            reader.read(ids_BT)
            there = reader.store.n_bytes() * KV_ITEM_BYTES / item_bytes
            said = n_bytes * 9
            require(there == said, f"KV bytes, cache {name}: the ledger says {said:,}, the store holds {there:,.10g}")


def kv_bytes(subject: Subject) -> None:
    """At each depth."""
    each((f"{n} loops", lambda n=n: check_kv_bytes(subject.config, n)) for n in depths(subject.config))


# -- round trips ------------------------------------------------------------------------------------------------------


def check_config_round_trip(config: ModelConfig) -> None:
    """JSON, and back."""
    text = config.model_dump_json()
    again = ModelConfig.model_validate_json(text)
    wrong = [name for name in ModelConfig.model_fields if getattr(again, name) != getattr(config, name)]
    require(again == config, "the config that is read back from JSON is another", wrong)
    require(again.model_dump_json() == text, "the JSON of the config that is read back is another")
    require(hash(again) == hash(config), "the hash of the config that is read back is another")


def config_round_trip(subject: Subject) -> None:
    """Of the model's config."""
    check_config_round_trip(subject.config)


@torch.no_grad()
def check_checkpoint_round_trip(model: RecurrentLM) -> None:
    """Saved and loaded into a new model: the same weights, the same logits, to the bit. In fp32, as it is trained."""
    model, n_loops, ids_BT = model.float(), depths(model.config)[-1], tokens(2, 12)
    with tempfile.TemporaryDirectory(prefix="alcoda-laws-") as folder:
        path = checkpoint.save(Path(folder), 1, model, {}, {})
        again = checkpoint.build(model.config, torch.device("cpu")).init(1).eval()
        checkpoint.load_weights(path, reminded(again))
    # Parameters, not the state that is saved: what the state forgets is then missed.
    wrong = [n for (n, p), q in zip(model.named_parameters(), again.parameters(), strict=True) if not torch.equal(p, q)]
    require(not wrong, f"a checkpoint changes or loses {', '.join(wrong)}", wrong)
    close_logits(again(ids_BT, n_loops), model(ids_BT, n_loops), 0.0, "a checkpoint changes the logits")


def checkpoint_round_trip(subject: Subject) -> None:
    """Of random weights."""
    check_checkpoint_round_trip(subject.model())

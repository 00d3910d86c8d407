"""Law 3, of caches of one slot for all loops: what is read with them is what their definition says.

The reference keeps the keys of every loop of every token, apart, and makes of them at each query what the definition
says. It runs one row and one token at a time, at the depth of that token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits
from alcoda.depth.replay import replay
from alcoda.depth.rules import NEVER, TraceRule
from alcoda.depth.sequential import ExitReader
from alcoda.errors import UsageError
from alcoda.laws.exits import at_work, padded, refuses_exits, same_depths
from alcoda.laws.law import Parts, close_logits, require
from alcoda.laws.subject import EXACT, Subject, bitwise, depths, leaks_at_eval, make_plain, tokens
from alcoda.model.cache_policy import PER_LOOP, CachePolicy, LastCache, MeanCache
from alcoda.model.exit_keys import CopiedKeys
from alcoda.model.keys import CORE, Keys, Slot, View
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader

B, T = 2, 4
CHEAP: tuple[CachePolicy, ...] = (MeanCache(), LastCache())
RULE = "state"
"""The exit rule that is tried; any other differs in when it fires."""


def no_cheap_cache(subject: Subject) -> str | None:
    """The exception: loops that cannot share a slot, which the model says."""
    try:
        for cache in CHEAP:
            cache.check(subject.config)
    except UsageError as error:
        return f"declared: {error}"
    return leaks_at_eval(subject)


def no_exits(subject: Subject) -> str | None:
    """The exception of the law on batches, whose rows leave at loops of their own."""
    return no_cheap_cache(subject) or refuses_exits(subject)


# -- the reference ----------------------------------------------------------------------------------------------------

Left = Callable[[list[Tensor]], Tensor]
"""What a token leaves, of its keys (or values) of each loop that it ran."""

LEFT: dict[str, Left] = {"mean": lambda loops: sum(loops[1:], loops[0]) / len(loops), "last": lambda loops: loops[-1]}


class EveryKey:
    """A store of one row that forgets nothing: the keys of each layer by token and loop."""

    decodes: ClassVar[bool] = True

    def __init__(self, left: Left) -> None:
        self.left, self.n_tokens = left, 0
        self.pos_BS: Tensor | None = None
        self.kept: dict[tuple[str, int], list[list[Keys]]] = {}

    def open(
        self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device: torch.device
    ) -> View:
        """As `KeyStore.open`, of one token."""
        assert n_tokens == 1 and pos_BT is None and live_BT is None
        self.n_tokens += 1
        pos_S = torch.arange(self.n_tokens, device=device)
        return View(pos_S[-1:], pos_S, None, None, False)

    def ran(self, loop: int, ran_BT: Tensor) -> Tensor:
        """As `KeyStore.ran`: no route lets tokens out."""
        raise AssertionError("a route whose tokens lose keys has no such cache")

    def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        """As `KeyStore.write`."""
        stage, layer, _ = slot
        of_layer = self.kept.setdefault((stage, layer), [])
        if len(of_layer) < self.n_tokens:
            of_layer.append([])
        of_layer[-1].append((k_BGTK, v_BGTK))
        left = self.left if stage == CORE else LEFT["last"]
        k_BGSK, v_BGSK = (
            torch.cat([*(left([keys[i] for keys in token]) for token in of_layer[:-1]), own], 2)
            for i, own in enumerate((k_BGTK, v_BGTK))
        )
        return k_BGSK, v_BGSK


@torch.no_grad()
def slowly(model: RecurrentLM, ids_BT: Tensor, cache: CachePolicy, depths_BT: Tensor) -> Tensor:
    """Logits of the reference, where each token runs ``depths_BT`` loops."""
    rows = []
    for ids_T, depths_T in zip(ids_BT, depths_BT.tolist(), strict=True):
        reader, parts = Reader(model, 1), []
        reader.store = cast(CopiedKeys, EveryKey(LEFT[cache.kind]))
        for token, reader.n_loops in zip(ids_T.split(1), depths_T, strict=True):
            parts.append(reader.read(token[None]))
        rows.append(torch.cat(parts, 1))
    return model.logits(torch.cat(rows))


# -- laws -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_one_slot(model: RecurrentLM) -> None:
    """Tokens that run all loops; and tokens that leave by a rule, recorded and replayed."""
    ids_BT, parts, n = tokens(B, T), Parts(), depths(model.config)[-1]
    for cache in CHEAP:
        with parts.part(f"cache {cache.kind}, {n} loops"):
            # A capacity of 2 makes the buffers grow.
            logits = model.logits(Reader(model, n, 2, cache).read(ids_BT))
            expected = slowly(model, ids_BT, cache, torch.full_like(ids_BT, n))
            close_logits(logits, expected, EXACT, "not as defined")
        if refuses_exits(Subject(model.config)) is None:
            _check_exits(model, ids_BT, cache, parts)
    parts.settle()


def _check_exits(model: RecurrentLM, ids_BT: Tensor, cache: CachePolicy, parts: Parts) -> None:
    for what, test in at_work(model, ids_BT, (RULE,)):
        with parts.part(f"cache {cache.kind}, exit {what}"):
            reader = ExitReader(model, Exits(test, "at_exit", cache=cache), 2)
            logits = model.logits(reader.read(ids_BT))
            depths_BT = reader.depths_BT()
            close_logits(logits, slowly(model, ids_BT, cache, depths_BT), EXACT, "not as defined")
            found = replay(model, ids_BT, test, coda_keys="at_exit", cache=cache)
            same_depths(found.depths_BT, depths_BT, "replay is not reading")
            traced = TraceRule().build(model, test.n_loops, found.trace())
            again = replay(model, ids_BT, traced, cache=cache)
            same_depths(again.depths_BT, depths_BT, "trace")
            close_logits(model.logits(again.y_BTD), logits, 0.0, "trace")


@torch.no_grad()
def check_same(model: RecurrentLM) -> None:
    """With one loop, and at any depth where loops make no keys of their own, every cache holds the same, to the bit."""
    ids_BT, parts = tokens(B, T), Parts()
    for n in depths(model.config) if not model.config.keys.own_keys else (1,):
        by_token = [Reader(model, n) for _ in CHEAP]
        for cache, plain in zip(CHEAP, by_token, strict=True):
            with parts.part(f"cache {cache.kind}, {n} loops"):
                expected = torch.cat([plain.read(token) for token in ids_BT.split(1, 1)], 1)
                found = Reader(model, n, cache=cache).read(ids_BT)
                close_logits(model.logits(found), model.logits(expected), bitwise(model.config), "not cache per_loop")
    parts.settle()


@torch.no_grad()
def check_batches(model: RecurrentLM) -> None:
    """Rows of several lengths in one batch, padded on either side, with exits, are those rows alone."""
    rows, parts = [tokens(1, n, seed=n)[0] for n in (T, T - 2, 1)], Parts()
    _, test = next(at_work(model, torch.stack([rows[0], tokens(1, T, seed=9)[0]]), (RULE,)))
    for cache in CHEAP:
        alone = [replay(model, ids[None], test, coda_keys="at_exit", cache=cache) for ids in rows]
        for side in ("left", "right"):
            ids_BT, live_BT = padded(rows, side == "left")
            found = replay(model, ids_BT, test, live_BT=live_BT, coda_keys="at_exit", cache=cache)
            with parts.part(f"cache {cache.kind}, {side}"):
                for row, one in enumerate(alone):
                    same_depths(found.depths_BT[row, live_BT[row]][None], one.depths_BT, "padded", [row])
                    logits = model.logits(found.y_BTD)[row, live_BT[row]], model.logits(one.y_BTD)[0]
                    close_logits(*logits, EXACT, f"{side}-padded", row)
    parts.settle()


@torch.no_grad()
def check_refusal(model: RecurrentLM) -> None:
    """A pass of several tokens into such a cache is refused."""
    for cache in CHEAP:
        try:
            model(tokens(1, 2), 1, store=cache.store({}, 2))
        except ValueError as error:
            require("run them one by one" in str(error), f"refused for another reason: {error}")
        else:
            require(False, f"cache {cache.kind} takes a pass of two tokens: the second reads what is not left yet")


@torch.no_grad()
def differ(model: RecurrentLM, n_loops: int) -> dict[str, float]:
    """By cache: how far logits are from those of `per_loop`."""
    ids_BT = tokens(B, T)
    expected = model.logits(replay(model, ids_BT, NEVER, n_loops, cache=PER_LOOP).y_BTD)
    return {
        cache.kind: float((model.logits(Reader(model, n_loops, cache=cache).read(ids_BT)) - expected).abs().max())
        for cache in CHEAP
    }


def one_slot(subject: Subject) -> None:
    """Of a model with the memories that its own passes make."""
    check_one_slot(make_plain(subject.config, subject.seed))


def same(subject: Subject) -> None:
    """Also that what cannot be is refused."""
    model = make_plain(subject.config, subject.seed)
    check_same(model)
    check_refusal(model)


def batches(subject: Subject) -> None:
    """Of such a model."""
    check_batches(make_plain(subject.config, subject.seed))

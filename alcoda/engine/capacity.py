"""How many requests fit: what is left of a memory after the weights, in tokens of each cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from alcoda.engine.cache import bytes_per_token, up
from alcoda.engine.options import CACHE_TOKENS, Options
from alcoda.engine.paged import kept_in, paged_on
from alcoda.engine.refusals import check_serves
from alcoda.errors import UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy, caches
from alcoda.model.config import ModelConfig
from alcoda.model.lm import RecurrentLM
from alcoda.model.precision import hold_in

ROW_BYTES = 40
"""Of a free row: a number in a list."""


@dataclass(frozen=True)
class CacheRoom:
    """One cache.

    Attributes:
        cache: the kind of `alcoda.model.cache_policy.CachePolicy`.
        coda_keys: at_exit, one slot for each coda layer; or per_loop, where an exit rule looks at logits after every
            loop.
        bytes_per_token: of all slots.
        n_tokens: that there is room for, of all requests; whole pages.
        requests: by their length, how many there is room for at one time.
    """

    cache: str
    coda_keys: str
    bytes_per_token: int
    n_tokens: int
    requests: dict[int, int]


@dataclass(frozen=True)
class CapacityResult:
    """What `capacity` found.

    Attributes:
        what: the run or the recipe, with its settings.
        memory_bytes: in all.
        weights_bytes: of it, counted once. (A CPU's engine lays weights out once more, where it is not loaded to decode
            only.)
        loops: that a token may run.
        seq_len: of the longest request.
        dtype: that is decoded in: of the cache, and of the weights of linear maps.
        keys: the axis ``keys`` of the model; with anchor keys all caches are one.
        page_tokens: of a page of the cache, of which each request has whole ones; 1 where there are none (a CPU, and a
            GPU without `alcoda.engine.paged`).
    """

    what: str
    memory_bytes: int
    weights_bytes: int
    loops: int
    seq_len: int
    dtype: str
    keys: str
    page_tokens: int
    rooms: tuple[CacheRoom, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


def capacity(
    config: ModelConfig,
    memory_bytes: int,
    loops: int | None,
    lengths: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> CapacityResult:
    """How many requests of some lengths each cache of a model holds.

    Args:
        loops: the model's ``n_loops`` where None.
        lengths: tokens of a request, prompt and new ones; the whole context where there are none.
        dtype: bf16: of keys and of linear maps, all else in fp32 (as `alcoda.training.load.load_run` holds them).
        device: whose cache it is.
        what: as of `CapacityResult`.

    Raises:
        UsageError: a model that the engine does not serve, a length beyond its context, a memory that does not hold
            the weights.
    """
    n_loops = config.check_loops(config.n_loops if loops is None else loops)
    lengths = sorted(set(lengths)) or [config.seq_len]
    for length in lengths:
        if not 2 <= length <= config.seq_len:
            raise UsageError(f"tokens={length}: of a request, from 2 (a prompt and one more) to {config.seq_len}")
    with torch.device("meta"):
        model = RecurrentLM(config)
    check_serves(model)
    if dtype != torch.float32:
        hold_in(model, dtype)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if weights >= memory_bytes:
        raise UsageError(f"memory of {memory_bytes:,} bytes: the weights alone take {weights:,}; more is needed")
    page_tokens, rooms = paged_on(config, dtype, device).page_tokens, []
    for policy in _caches(config):
        for coda_keys in ("at_exit", "per_loop") if config.n_coda and n_loops > 1 else ("at_exit",):
            size = bytes_per_token(config, n_loops, dtype, coda_keys == "per_loop", policy)
            # An arena has one page (of a token, on a CPU) more than it gives away; of the last token that is drawn no
            # keys are kept.
            n_pages = max((memory_bytes - weights) // (size * page_tokens) - 1, 0)
            n_tokens = n_pages * page_tokens
            requests = {length: n_tokens // up(length - 1, page_tokens) for length in lengths}
            rooms.append(CacheRoom(policy.kind, coda_keys, size, n_tokens, requests))
    name = str(dtype).removeprefix("torch.")
    return CapacityResult(
        what, memory_bytes, weights, n_loops, config.seq_len, name, config.keys.kind, page_tokens, tuple(rooms)
    )


def check_room(model: RecurrentLM, options: Options, n_loops: int, dtype: torch.dtype, free_bytes: int | None) -> None:
    """UsageError where an engine with these options could not get its memory, with what fits.

    Only what was asked for is looked at: the cache where ``cache_tokens`` says its size, or ``n_loops`` is more than
    the model's own (else it is a part of `alcoda.engine.options.CACHE_TOKENS`, and taken as it is written), and the
    least that a token of a launch needs
    (state and anchor in fp32 or finer are twice ``d_model`` numbers, logits ``vocab_size``).

    Args:
        dtype: of the passes.
        free_bytes: beside the weights; None: not known.
    """
    if free_bytes is None:
        return
    config, held = model.config, kept_in(model, dtype)
    size = bytes_per_token(config, n_loops, held, True, options.cache)
    page_tokens = paged_on(config, held, model.embed.weight.device).page_tokens
    n_tokens = up(options.cache_tokens or 0, page_tokens)
    if n_tokens * size > free_bytes:
        fits = free_bytes // (size * page_tokens) * page_tokens
        raise UsageError(
            f"cache_tokens={options.cache_tokens:,}: keys of so many tokens take {_gb(n_tokens * size)} ({size:,} "
            f"bytes each) and {_gb(free_bytes)} of memory are free: {fits:,} fit at most"
        )
    if not n_tokens and n_loops > config.n_loops:
        places = options.places or options.width
        whole = up(min(places * config.seq_len, max(CACHE_TOKENS, config.seq_len)), page_tokens)
        if whole * size > free_bytes:
            raise UsageError(
                f"loops={n_loops:,}: keys of {whole:,} tokens take {_gb(whole * size)} ({size:,} bytes each) and "
                f"{_gb(free_bytes)} of memory are free: lower loops, or say how many tokens there is to be room for "
                "(cache_tokens)"
            )
    left = free_bytes - n_tokens * size

    def needs(width: int) -> int:
        # A launch is as wide as tokens have room in the cache; one that is always full, as it may be.
        launch = width if options.deterministic else min(width, n_tokens or max(CACHE_TOKENS, config.seq_len))
        return ((options.places or width) + width) * (ROW_BYTES + 8 * config.d_model) + launch * 4 * config.vocab_size

    if needs(options.width) > left:
        fits = bisect_right(range(1, min(options.width, left + 1)), left, key=needs)  # a token takes a byte and more
        way = f"{fits:,} fit at most" if fits else "not one fits; lower cache_tokens" if n_tokens else "not one fits"
        raise UsageError(
            f"width={options.width:,}: launches of so many tokens take {_gb(needs(options.width))} or more, and "
            f"{_gb(left)} of memory are free: {way}"
        )


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes < 10**18 else "over a billion GB"


def _caches(config: ModelConfig) -> list[CachePolicy]:
    """Those that a model can have."""
    found: list[CachePolicy] = [PER_LOOP]
    for policy in caches().values():
        try:
            policy.check(config)
        except UsageError:
            continue
        found += [policy] if policy != PER_LOOP else []
    return found

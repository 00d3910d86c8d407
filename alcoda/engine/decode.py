"""Cached decoding of one sequence, token by token: the reference that anything faster is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits, pick_coda_keys
from alcoda.depth.rules import ExitRule, at_work
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest
from alcoda.engine.sampling import Row, Sampling, draw
from alcoda.errors import RunError, UsageError
from alcoda.model.cache_policy import PER_LOOP, CachePolicy
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Prefill, Reader
from alcoda.training.device import autocast


def decode(
    model: RecurrentLM,
    prompt: Sequence[int],
    *,
    loops: int,
    max_tokens: int,
    sampling: Sampling | None = None,
    stop: int | None = None,
    n_vocab: int | None = None,
    dtype: torch.dtype = torch.float32,
    prefill: Prefill | None = None,
    rule: ExitRule | ExitTest | None = None,
    depths: list[Tensor] | None = None,
    cache: CachePolicy = PER_LOOP,
) -> Iterator[int]:
    """Yields token ids after ``prompt`` until ``stop`` (not yielded), ``max_tokens`` or the end of the context.

    Args:
        prompt: at least one id.
        loops: loops of the core for every token; with ``rule``, at most.
        max_tokens: how many at most.
        sampling: how each is drawn; None: the likeliest.
        stop: the end-of-text id.
        n_vocab: ids below it exist; an embedding padded beyond the tokenizer is never drawn from there.
        dtype: of the passes.
        prefill: how the prompt is read where the model has a memory; None: token by token, as all after it is.
        rule: when a token leaves the loop early; None: none does.
        depths: with a rule, what it makes tokens run is appended, pass by pass, [1, T]: the prompt's first.
        cache: what a token leaves in the cache; other than `per_loop`, the prompt too is read token by token.
    """
    model.config.check_loops(loops)
    model.config.check_decodes()
    _check(len(prompt), max_tokens, model.config.seq_len)
    sampling = Sampling() if sampling is None else sampling
    sampling.check(model.config.vocab_size if n_vocab is None else n_vocab)
    room = min(max_tokens, model.config.seq_len - len(prompt))
    output: list[int] = []

    def pick(logits_V: Tensor) -> int | None:
        (drawn,) = draw(logits_V[None], [Row(sampling, prompt, output)], n_vocab)
        if isinstance(drawn, str):
            raise RunError(drawn)
        output.append(drawn.token)
        return None if drawn.token == stop else drawn.token

    # The arguments are checked when this is called, not when the first token is asked for.
    capacity = len(prompt) + room
    if rule is None:
        reader = Reader(model, loops, capacity, cache)
        reader.check_prefill(prefill)
        return _decode(reader, prompt, room, pick, dtype, prefill)
    test = at_work(rule, model, loops)
    reader = ExitReader(model, Exits(test, pick_coda_keys(test, None), cache=cache), capacity)
    reader.check_prefill(prefill)
    reader.depths = reader.depths if depths is None else depths
    return _decode(reader, prompt, room, pick, dtype, prefill)


@torch.no_grad()
def _decode(
    reader: Reader,
    prompt: Sequence[int],
    room: int,
    pick: Callable[[Tensor], int | None],
    dtype: torch.dtype,
    prefill: Prefill | None,
) -> Iterator[int]:
    model = reader.model
    device = model.embed.weight.device
    ids_BT = torch.tensor([list(prompt)], device=device)
    for _ in range(room):
        with autocast(device, dtype):
            logits_V = model.logits(reader.read(ids_BT, prefill)[0, -1])
        token = pick(logits_V)
        if token is None:
            return
        yield token
        prefill = None
        ids_BT = torch.tensor([[token]], device=device)


def _check(n_prompt: int, max_tokens: int, seq_len: int) -> None:
    if n_prompt < 1:
        raise UsageError("the prompt has no tokens: give some text")
    if n_prompt >= seq_len:
        raise UsageError(
            f"the prompt has {n_prompt} tokens (with the one that begins a document) and the context holds {seq_len}, "
            f"the next one included: shorten it by {n_prompt - seq_len + 1} or more"
        )
    if max_tokens < 1:
        raise UsageError(f"max_tokens={max_tokens}: at least 1")

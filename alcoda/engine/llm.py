"""`LM`: a trained model in three lines of Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alcoda.config import validate
from alcoda.depth.rules import ExitRule
from alcoda.depth.trajectory import NUMBERS, trace
from alcoda.depth.watch import ExitTest
from alcoda.engine.decode import decode
from alcoda.engine.sampling import Sampling
from alcoda.engine.text import TextStream, check_stop
from alcoda.errors import UsageError
from alcoda.model.cache_policy import CachePolicy, pick_cache
from alcoda.model.prefill import Prefill, read_rows
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun, load_run

Ids = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor


class LM:
    """A trained model with its tokenizer.

    >>> lm = alcoda.load("runs/quickstart")
    >>> print(lm.generate("def main(", loops=8))
    >>> lm.logits(lm.tokenizer.encode("import os"), loops=4).shape
    """

    def __init__(self, loaded: LoadedRun) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.recipe = loaded.recipe

    @property
    def n_loops(self) -> int:
        """The depth used where none is named."""
        return self.model.config.n_loops

    @torch.no_grad()
    def logits(
        self,
        ids: Ids,
        loops: int | None = None,
        prefill: Prefill | str | None = None,
        cache: CachePolicy | str | None = None,
    ) -> Tensor:
        """Logits of the next token after each of ``ids``, in fp32.

        Args:
            ids: ``[T]`` or ``[B, T]`` token ids (rows of one length).
            loops: loops of the core.
            prefill: how a model with a memory reads them: exact (token by token; where None), interleaved, iterated,
                zero, or a `Prefill`.
            cache: what a token leaves in the cache: per_loop (where None), or mean or last: token by token, as decoding
                with it computes them (docs/design/axes/cache.md).

        Returns:
            ``[T, V]`` or ``[B, T, V]``.

        Raises:
            UsageError: ids that the model does not have, rows of several lengths, or no ids; a cache that the model
                cannot have.
        """
        loops = self._loops(loops)
        rows_BT, is_one = self._rows(ids)
        with autocast(rows_BT.device, self.loaded.dtype):
            reading = self.loaded.reading(prefill, None, cache)
            (y_BTD,) = read_rows(self.model, rows_BT, [loops], reading)
            logits_BTV = self.model.logits(y_BTD).float()
        return logits_BTV[0] if is_one else logits_BTV

    def trace(self, ids: Ids, record: Sequence[str] = NUMBERS, loops: int | None = None) -> dict[str, Tensor]:
        """What each of ``ids`` goes through from loop to loop.

        >>> lm.trace(lm.tokenizer.encode("import os"), record=["kl_previous", "argmax"], loops=16)["argmax"].shape

        Args:
            ids: ``[T]`` or ``[B, T]`` token ids (rows of one length).
            record: names of `alcoda.depth.trajectory.trace`: kl_previous, kl_final, entropy, argmax, loss (of the next
                of ``ids``; NaN after the last), state_change, second_order; and state, logits.
            loops: how many run; the model's ``n_loops`` where None. A model with a memory is read token by token.

        Returns:
            By name ``[T, R]`` or ``[B, T, R]`` (state ``[..., R, D]``, logits ``[..., R, V]``), in fp32 or finer.

        Raises:
            UsageError: a dense model, a name that there is not; and as `logits`.
        """
        n_loops = self._loops(loops)
        rows_BT, is_one = self._rows(ids)
        with autocast(rows_BT.device, self.loaded.dtype):
            found = trace(self.model, rows_BT, n_loops, rows_BT.roll(-1, 1), record)
        if "loss" in found:
            found["loss"][:, -1] = float("nan")
        return {name: x[0] for name, x in found.items()} if is_one else found

    def _rows(self, ids: Ids) -> tuple[Tensor, bool]:
        """``ids`` as ``[B, T]`` on the model's device, and whether they were one row without a batch; or UsageError."""
        try:
            given = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
        except ValueError:
            raise UsageError("ids: all rows must have one length") from None
        if given.ndim not in (1, 2) or given.size == 0 or not np.issubdtype(given.dtype, np.integer):
            raise UsageError(
                f"ids of shape {given.shape} and type {given.dtype}: whole numbers [T] or [B, T] are needed"
            )
        ids_BT = torch.from_numpy(given.astype(np.int64))
        low, high, n = int(ids_BT.min()), int(ids_BT.max()), self.model.config.vocab_size
        if low < 0 or high >= n:
            raise UsageError(f"ids from {low} to {high}: this model has the ids 0 to {n - 1}")
        rows_BT = ids_BT.to(self.model.embed.weight.device)
        return (rows_BT[None], True) if ids_BT.dim() == 1 else (rows_BT, False)

    def generate(self, prompt: str, **kwargs: object) -> str:
        """The text that follows ``prompt``; arguments as `stream`."""
        return "".join(self.stream(prompt, **kwargs))  # pyrefly: ignore

    def stream(
        self,
        prompt: str,
        *,
        loops: int | None = None,
        max_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        prefill: Prefill | str | None = None,
        exit: ExitRule | ExitTest | str | None = None,
        threshold: float | Sequence[float] | None = None,
        depths: list[Tensor] | None = None,
        cache: CachePolicy | str | None = None,
    ) -> Iterator[str]:
        """The text that follows ``prompt``, piece by piece as it comes, each piece whole characters.

        Args:
            prompt: text; an empty one begins a document.
            loops: loops of the core for every token (with ``exit``, at most); the model's ``n_loops`` where None.
            max_tokens: how many tokens at most; the context's end comes first where it is nearer.
            temperature: 0 takes the likeliest token each time.
            top_k: draw among so many likeliest tokens only.
            top_p: draw among the fewest likeliest tokens only whose probabilities sum to this.
            min_p: draw among tokens only that are at least so many times as likely as the likeliest.
            repetition_penalty: above 1, tokens in prompt or text become less likely.
            presence_penalty: off the logit of tokens in the text; below 0, added.
            frequency_penalty: likewise, for each time that they are there.
            logit_bias: token id -> what is added to its logit, -100 to 100.
            seed: of the draws; the same seed gives the same text.
            stop: the text ends before the first of these strings (at most four).
            prefill: how a model with a memory reads the prompt: interleaved (as in training; where None), exact,
                iterated, zero, or a `Prefill`. What follows is read token by token. With ``exit``, all of it exactly.
            exit: when a token leaves the loop early: a rule, ``"state"``, ``"state:0.01"`` (docs/design/axes/exit.md),
                or a tier that ``alcoda calibrate`` chose: ``"balanced"``.
            threshold: of a rule that is named; one for each loop, or one for all.
            depths: as `alcoda.engine.decode.decode`.
            cache: what a token leaves in the cache: per_loop (where None), mean or last, which read prompts exactly.

        Raises:
            UsageError: at once, for an argument that cannot be, and a prompt that fills the context.
        """
        if threshold is not None and not isinstance(exit, str):
            raise UsageError(
                f"threshold={threshold}: it is of an exit rule that is named: exit='state', threshold=0.01"
            )
        sampling = validate(
            Sampling,
            {
                "temperature": temperature,
                "top_k": top_k,
                "top_p": top_p,
                "min_p": min_p,
                "repetition_penalty": repetition_penalty,
                "presence_penalty": presence_penalty,
                "frequency_penalty": frequency_penalty,
                "logit_bias": {} if logit_bias is None else logit_bias,
                "seed": seed,
            },
        )
        text = TextStream(self.tokenizer, check_stop(stop))
        rule = self.loaded.exit(exit, loops, threshold).test if isinstance(exit, str) else exit
        keeps = pick_cache(cache, self.model.config)
        loops = self._loops(rule.n_loops if loops is None and isinstance(rule, ExitTest) else loops)
        # Training documents begin with end-of-text: it is what the first token is predicted from.
        ids = [self.tokenizer.eot, *self.tokenizer.encode(prompt).tolist()]
        tokens = decode(
            self.model,
            ids,
            loops=loops,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=self.tokenizer.eot,
            n_vocab=self.tokenizer.vocab_size,
            dtype=self.loaded.dtype,
            prefill=self.loaded.prefill(prefill, "interleaved" if rule is None and keeps.is_parallel else "exact"),
            rule=rule,
            depths=depths,
            cache=keeps,
        )
        return _pieces(tokens, text)

    def _loops(self, loops: int | None) -> int:
        return self.model.config.check_loops(self.n_loops if loops is None else loops)


def _pieces(tokens: Iterator[int], text: TextStream) -> Iterator[str]:
    for token in tokens:
        piece = text.push(token)
        if piece:
            yield piece
        if text.stopped:
            return
    rest = text.finish()
    if rest:
        yield rest


def load(path: str | Path, checkpoint: str = "best", device: str = "auto", dtype: str = "auto") -> LM:
    """The model of a run folder.

    Args:
        path: the folder that ``alcoda train --out`` or ``alcoda pack`` wrote, or the name of a model that comes with
            the package.
        checkpoint: ``best`` (lowest validation loss), ``last``, or a checkpoint's name.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``bfloat16``, ``float32``, or ``auto``: float32 for a run that asked for it, else bf16 where the hardware
            multiplies in it.

    Raises:
        UsageError, RunError: no run, no checkpoint, or a damaged one; the message says which.
    """
    return LM(load_run(path, checkpoint, device, dtype))

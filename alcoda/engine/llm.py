"""`LM`: a trained model in three lines of Python."""

from __future__ import annotations

import operator
import reprlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alcoda import progress
from alcoda.config import validate
from alcoda.depth.rules import ExitRule, at_work
from alcoda.depth.trajectory import NUMBERS, trace
from alcoda.depth.watch import ExitTest
from alcoda.engine.alone import Alone
from alcoda.engine.engine import Engine
from alcoda.engine.generated import Generated, Pieces, Texts
from alcoda.engine.options import CACHE_TOKENS, Options
from alcoda.engine.packed import DECODES_ONLY, Released, release
from alcoda.engine.paged import room
from alcoda.engine.refusals import refuses
from alcoda.engine.request import Request
from alcoda.engine.sampling import Sampling
from alcoda.engine.service import Service
from alcoda.engine.text import check_stop
from alcoda.errors import RunError, UsageError
from alcoda.interop.foreign import is_foreign
from alcoda.interop.hf_save import MAX_SHARD_BYTES, Saved, save_pretrained
from alcoda.interop.load import load_foreign
from alcoda.model.cache_policy import CachePolicy, pick_cache
from alcoda.model.prefill import Prefill, read_rows
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun, load_run

Ids = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor
Prompt = str | Sequence[int] | np.ndarray | Tensor


MOST_TESTS = 256
"""Exit tests that are kept to be shared: a server's clients may ask for any number of thresholds."""


class PromptError(UsageError):
    """A prompt that does not fit: of many, the others may."""


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
        self.stats: dict[str, Any] | None = None
        """What the engine did at the last `generate`: tokens/s, mean loops, launches, drafts."""
        self._tests: dict[Any, ExitTest] = {}
        self._lock = threading.Lock()

    @property
    def n_loops(self) -> int:
        """The depth used where none is named."""
        return self.model.config.n_loops

    @property
    def decodes_only(self) -> bool:
        """Whether it was loaded to decode only: it generates, and refuses all else."""
        return isinstance(self.model, Released)

    def whole(self) -> LoadedRun:
        """What was loaded, for what reads the model's own weights; UsageError where it decodes only."""
        if self.decodes_only:
            raise UsageError(DECODES_ONLY)
        return self.loaded

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

    def save_pretrained(
        self, folder: str | Path, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> Saved:
        """Write a folder for the transformers library, which `load` reads too (docs/huggingface.md).

        Args:
            folder: new, or empty.
            dtype: of the weights: bfloat16 or float32; None: as they are held, or bfloat16 where that loses nothing.
            max_shard_bytes: of one file of weights.

        Raises:
            UsageError: a model with a memory, an unknown dtype, a folder that is not empty.
        """
        return save_pretrained(self.loaded, folder, dtype, max_shard_bytes)

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

    def generate(self, prompt: Any, *, details: bool = False, engine: Options | None = None, **how: Any) -> Any:
        """What follows a prompt, or each of a list of them: all at one time, each token at its own loop.

        >>> lm.generate(["Once upon a time", "It was"], exit="balanced", max_tokens=64)
        >>> one = lm.generate("Once upon a time", trace=True)
        >>> one.text, one.mean_loops, one.tokens[0].steps

        Args:
            prompt: text, or a list of texts.
            details: for `Generated` objects in place of texts: tokens, the loops of each, why it ended. In a list one
                that failed has its ``error``, and the others are whole. Also where ``trace`` or ``logprobs`` is asked.
            engine: how it works (`alcoda.engine.options.Options`): width, wavefront, deterministic.
            how: as `request`; ``n`` completions of each prompt come one after the other.

        Returns:
            A text (list of them for a list of prompts, or for ``n``), or `Generated`.

        Raises:
            UsageError: an argument that cannot be; of one prompt alone, that it does not fit.
            RunError: without ``details``, where one failed: which, and why.
        """
        one = isinstance(prompt, str)
        prompts = [prompt] if one else list(prompt)
        details = details or bool(how.get("trace")) or how.get("logprobs") is not None
        requests: list[Request | str] = []
        for text in prompts:
            try:
                requests.append(self.request(text, **how))
            except PromptError as error:
                if one:
                    raise
                requests.append(str(error))
        found = self._run(prompts, requests, engine)
        failed = [(i, x.error) for i, x in enumerate(found) if x.error is not None]
        if failed and not details:
            i, error = failed[0]
            raise RunError(error if one else f"prompt {i}: {error} (details=True gives the others)")
        told = found if details else [x.text for x in found]
        return told[0] if one and len(told) == 1 else told

    def _run(
        self, prompts: Sequence[str], requests: Sequence[Request | str], options: Options | None
    ) -> list[Generated]:
        asked = [request for request in requests if isinstance(request, Request)]
        if not asked:
            return [Generated(p, "", (), "error", str(why)) for p, why in zip(prompts, requests, strict=True)]
        engine = self.engine(asked, options)
        completions = {request: engine.submit(request) for request in asked}
        with progress.bar("generating", sum(request.n for request in asked)) as advance:
            for changed in engine.steps():
                advance(sum(one.finish is not None for one in changed))
        if isinstance(engine, Engine):
            self.stats = engine.stats.report(self.model.config, engine.n_loops)
        found: list[Generated] = []
        for prompt, request in zip(prompts, requests, strict=True):
            if isinstance(request, str):
                found.append(Generated(prompt, "", (), "error", request))
                continue
            texts = request.halt
            assert isinstance(texts, Texts)
            found += [Generated.of(completion, prompt, texts) for completion in completions[request]]
        return found

    def engine(self, requests: Sequence[Request], options: Options | None = None) -> Engine | Alone:
        """An engine with room for these requests (`alcoda.engine.engine.Engine`); `Alone` where it cannot serve them.

        Args:
            options: its cache is that of the requests; a ``cache_tokens`` that is not set is made to fit.
        """
        options = Options() if options is None else options
        options = replace(options, cache=requests[0].cache or options.cache)
        if refuses(self.model):
            return Alone(self.model, options, **self._precision)
        if options.cache_tokens is None:
            needs = [len(request.prompt) + request.max_tokens for request in requests for _ in range(request.n)]
            longest = sorted(needs, reverse=True)[: options.places or options.width]
            places = room(self.model, self.loaded.decode_dtype, longest)
            options = replace(options, cache_tokens=max(min(places, CACHE_TOKENS), *needs))
        loops = [request.loops or (request.test.n_loops if request.test else self.n_loops) for request in requests]
        return self.new_engine(options, max(loops))

    def new_engine(self, options: Options = Options(), loops: int | None = None) -> Engine:
        """An engine of this model as the options say, whose requests run ``loops`` loops at most; the model's own where
        None.

        Raises:
            UsageError: a model that the engine cannot serve.
        """
        return Engine(self.model, options, n_loops=loops, **self._precision)

    @property
    def _precision(self) -> dict[str, Any]:
        return {"dtype": self.loaded.decode_dtype, "n_vocab": self.tokenizer.vocab_size}

    def stream(self, prompt: str, *, engine: Options | None = None, **how: Any) -> Pieces:
        """The text that follows ``prompt``, piece by piece as it comes, each piece whole characters; arguments as
        `request`, of one completion.

        Raises:
            UsageError: at once, for an argument that cannot be, and a prompt that fills the context.
        """
        request = self.request(prompt, **how)
        if request.n != 1:
            raise UsageError(f"n={request.n} in a stream: one completion; generate gives more")
        made = self.engine([request], engine)
        (completion,) = made.submit(request)
        steps = made.steps()
        texts = request.halt
        assert isinstance(texts, Texts)
        return Pieces(completion, texts, lambda: next(steps, None) is not None)

    def service(self, engine: Options | None = None, loops: int | None = None) -> Service:
        """An engine of this model for `asyncio`, whose prompts share launches; arguments as `Service`."""
        return Service(self, Options() if engine is None else engine, loops)

    def request(
        self,
        prompt: Prompt,
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
        logprobs: int | None = None,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        ignore_eot: bool = False,
        prefill: Prefill | str | None = None,
        exit: ExitRule | ExitTest | str | None = None,
        threshold: float | Sequence[float] | None = None,
        min_loops: int | None = None,
        max_loops: int | None = None,
        trace: bool = False,
        cache: CachePolicy | str | None = None,
    ) -> Request:
        """A request of the engine.

        Args:
            prompt: text, an empty one begins a document; or token ids, to which none is added.
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
            logprobs: how many likeliest tokens are told of beside each one drawn; None: no log-probabilities.
            n: completions, each with noise of its own.
            stop: the text ends before the first of these strings (at most four).
            ignore_eot: whether it goes on at the token that ends a document, which is then like others.
            prefill: how a model with a memory reads the prompt: interleaved (as in training; where None), exact,
                iterated, zero, or a `Prefill`. What follows is read token by token. With ``exit``, all of it exactly.
            exit: when a token leaves the loop early: a rule, ``"state"``, ``"state:0.01"`` (docs/design/axes/exit.md),
                or a tier that ``alcoda calibrate`` chose: ``"balanced"``.
            threshold: of a rule that is named; one for each loop, or one for all.
            min_loops: with ``exit``, no token leaves before.
            max_loops: with ``exit``, every token leaves then, where it has not.
            trace: whether to keep what each token goes through from loop to loop (state change, KL, top tokens).
            cache: what a token leaves in the cache: per_loop (where None), mean or last, which read prompts exactly.

        Raises:
            PromptError: the prompt fills the context.
            UsageError: another argument that cannot be.
        """
        if threshold is not None and not isinstance(exit, str):
            raise UsageError(
                f"threshold={threshold}: it is of an exit rule that is named: exit='state', threshold=0.01"
            )
        self.model.config.check_decodes()
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
                "logprobs": logprobs,
            },
        )
        sampling.check(self.tokenizer.vocab_size)
        texts = Texts(self.tokenizer, check_stop(stop))
        if exit is None and (min_loops is not None or max_loops is not None):
            raise UsageError("min_loops and max_loops are bounds of an exit: name one, or give loops alone")
        test = self._test(exit, loops, threshold, min_loops, max_loops)
        loops = self._loops(test.n_loops if loops is None and test is not None else loops)
        ids = self.prompt_ids(prompt)
        seq_len = self.model.config.seq_len
        if len(ids) >= seq_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens (with the one that begins a document) and the context holds "
                f"{seq_len}, the next one included: shorten it by {len(ids) - seq_len + 1} or more"
            )
        for name, value in (("max_tokens", max_tokens), ("n", n)):
            if value < 1:
                raise UsageError(f"{name}={value}: at least 1")
        keeps = pick_cache(cache, self.model.config)
        reads = "interleaved" if test is None and keeps.is_parallel else "exact"
        return Request(
            ids,
            min(max_tokens, seq_len - len(ids)),
            sampling,
            loops,
            test,
            n,
            frozenset() if ignore_eot else frozenset({self.tokenizer.eot}),
            texts,
            self.loaded.prefill(prefill, reads),
            trace,
            cache=keeps,
        )

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """What the model reads of a prompt. Training documents begin with a token of their own, which the first token
        of a text is predicted from; ids are taken as they are.

        Raises:
            UsageError: neither text nor ids.
        """
        if isinstance(prompt, str):
            return (self.tokenizer.bos, *self.tokenizer.encode(prompt).tolist())
        given = prompt.tolist() if isinstance(prompt, np.ndarray | Tensor) else prompt
        try:
            if isinstance(given, Sequence) and not isinstance(given, bytes):
                return tuple(map(operator.index, given))
        except TypeError:  # numbers that are not whole, or rows of them
            pass
        raise UsageError(f"prompt {reprlib.repr(prompt)}: a text, or the ids of its tokens, which are whole numbers")

    def _test(
        self,
        exit: ExitRule | ExitTest | str | None,
        loops: int | None,
        threshold: float | Sequence[float] | None,
        min_loops: int | None,
        max_loops: int | None,
    ) -> ExitTest | None:
        """The same test for the same rule: tokens of requests that share one are looked at together."""
        if exit is None:
            return None
        if not isinstance(exit, str):
            return at_work(exit, self.model, loops).within(min_loops, max_loops)
        tiers = self.loaded.run.exits_json
        stamp = tiers.stat().st_mtime_ns if tiers.is_file() else None
        exact = tuple(threshold) if isinstance(threshold, Sequence) else threshold
        key = (exit, loops, exact, min_loops, max_loops, stamp)
        with self._lock:
            found = self._tests.pop(key, None)
            if found is None:
                found = self.loaded.exit(exit, loops, threshold).test.within(min_loops, max_loops)
            self._tests[key] = found  # the newest stands last
            if len(self._tests) > MOST_TESTS:
                self._tests.pop(next(iter(self._tests)))
        return found

    def _loops(self, loops: int | None) -> int:
        return self.model.config.check_loops(self.n_loops if loops is None else loops)


def load(
    path: str | Path,
    checkpoint: str = "best",
    device: str = "auto",
    dtype: str = "auto",
    *,
    noise: bool = False,
    decode_only: bool = False,
) -> LM:
    """The model of a run folder, or of another project's.

    Args:
        path: the folder that ``alcoda train --out`` or ``alcoda pack`` wrote, the name of a model that comes with the
            package, or a folder of another project with config.json and safetensors (docs/interop.md).
        checkpoint: ``best`` (lowest validation loss), ``last``, or a checkpoint's name.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``bfloat16``, ``float32``, or ``auto``: float32 for a run that asked for it, else bf16 where the hardware
            multiplies in it.
        noise: of a folder of another project: as of `alcoda.import_model`.
        decode_only: it is to generate and no more: the engine lays weights out once more on a CPU, and the model's own
            are dropped, which halves its memory (docs/engine.md). ``logits``, ``trace``, ``save_pretrained`` and
            measurements are refused. A model that the engine does not serve decodes by its own weights and stays whole.

    Raises:
        UsageError, RunError: no run, no checkpoint, or a damaged one; the message says which.
    """
    if not is_foreign(path):
        if noise:
            raise UsageError(
                f"noise: {path} is a run, whose recipe says how its state begins (model.state_init.at_eval); leave it "
                "out, or import the checkpoint with it (alcoda import --noise)"
            )
        loaded = load_run(path, checkpoint, device, dtype)
    elif checkpoint not in ("best", "last"):
        raise UsageError(f"checkpoint {checkpoint!r}: {path} is no run of ours and has one state; leave it out")
    else:
        loaded = load_foreign(path, device, dtype, noise)
    if decode_only and not refuses(loaded.model):
        loaded = replace(loaded, model=release(loaded.model, loaded.decode_dtype))
    return LM(loaded)

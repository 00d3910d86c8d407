"""The engine: many requests at one time, each token at its own loop (docs/design, section 8).

`Scheduler` says what runs next, `Runner` runs it, and here is what it means: a token is drawn, a draft was right or was
not, a completion ends, a request failed and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor

from alcoda.depth.watch import Where
from alcoda.engine.cache import Attends
from alcoda.engine.options import CACHE_TOKENS, Options
from alcoda.engine.pace import LaunchTime, best_min_coda
from alcoda.engine.paged import room
from alcoda.engine.refusals import check_drafts, check_serves
from alcoda.engine.request import Completion, Finish, Item, Request, Token
from alcoda.engine.runner import Runner
from alcoda.engine.sampling import Drawn, Row, draw
from alcoda.engine.scheduler import Coda, Core, Part, Piece, Scheduler
from alcoda.engine.stats import Stats
from alcoda.engine.threads import threads_for
from alcoda.errors import RunError, UsageError
from alcoda.model.lm import RecurrentLM


class Engine:
    """Decodes requests of one model.

    Args:
        n_loops: that any request may run; the model's own where None.
        dtype: of the passes.
        n_vocab: ids below it exist; None: all of the embedding.

    Raises:
        UsageError: a model that cannot decode so: tokens at different loops need one core for all.
    """

    def __init__(
        self,
        model: RecurrentLM,
        options: Options = Options(),
        *,
        n_loops: int | None = None,
        dtype: torch.dtype = torch.float32,
        n_vocab: int | None = None,
    ) -> None:
        n_loops = model.config.n_loops if n_loops is None else model.config.check_loops(n_loops)
        check_serves(model)
        options.cache.check(model.config)
        if options.draft_loops is not None:
            check_drafts(model)
        self.model, self.options, self.n_loops, self.n_vocab = model, options, n_loops, n_vocab
        self.places = options.places or options.width
        seq_len = model.config.seq_len
        wanted = room(model, dtype, [seq_len] * self.places)
        n_tokens = options.cache_tokens or min(wanted, max(CACHE_TOKENS, seq_len))
        # Every completion has a token or a row of drafts in the loop, and drafts take what room is to spare.
        n_rows = self.places + options.width
        fill = options.deterministic
        self.runner = Runner(model, n_loops, n_tokens, options.width, dtype, fill, n_rows, options.cache)
        self.scheduler = Scheduler(
            options.width, self._min_coda, self._piece_tokens, options.draft_loops, options.refill, self._kind
        )
        # Bits are of how many threads there are, too.
        self.threads = None if options.deterministic or self.runner.device.type != "cpu" else threads_for(model)
        self.running: set[Completion] = set()
        self.stats = Stats()
        self._times = {kind: LaunchTime() for kind in ("core", "coda")}
        self._paces: dict[int, tuple[int, int]] = {}
        """By completions that run: tokens there were when it was found, and how many a launch of the coda waits for."""
        self._arrived: deque[Completion] = deque()
        self._cancelled: list[Completion] = []
        self._changed: dict[Completion, None] = {}

    @property
    def attends(self) -> Attends:
        """How the rows of a launch are attended."""
        return self.runner.arena.attends

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> list[Completion]:
        """Ask for a request's completions; they run as `step` is called. Safe from other threads.

        Raises:
            UsageError: what cannot be: no prompt, ids that there are not, more than the context or the cache holds, a
                rule of another model, a trace that is too short.
        """
        n_loops = self.check(request)
        made = [Completion(request, stream, n_loops) for stream in range(request.n)]
        self._arrived.extend(made)
        return made

    def check(self, request: Request) -> int:
        """Loops of a request's tokens, at most; or UsageError, as `submit`."""
        config, prompt = self.model.config, request.prompt
        self.check_prompt(prompt)
        n_vocab = config.vocab_size if self.n_vocab is None else self.n_vocab
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens={request.max_tokens}: at least 1")
        if request.n < 1:
            raise UsageError(f"n={request.n}: at least 1")
        if len(prompt) >= config.seq_len:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens (with the one that begins a document) and the context holds "
                f"{config.seq_len}, the next one included: shorten it by {len(prompt) - config.seq_len + 1} or more"
            )
        if len(prompt) + request.max_tokens > config.seq_len:
            raise UsageError(
                f"max_tokens={request.max_tokens} after a prompt of {len(prompt)} tokens, and the context holds "
                f"{config.seq_len}: lower max_tokens to {config.seq_len - len(prompt)}, or shorten the prompt"
            )
        n_cached = len(prompt) + request.max_tokens - 1
        if n_cached > self.runner.arena.n_tokens:
            raise UsageError(
                f"prompt and max_tokens are {n_cached} tokens, and the cache holds {self.runner.arena.n_tokens}: lower "
                "max_tokens, or give the engine a larger cache (cache_tokens)"
            )
        if request.cache not in (None, self.options.cache):
            raise UsageError(
                f"cache {request.cache}: this engine keeps {self.options.cache}; ask for that, or make another engine"
            )
        request.sampling.check(n_vocab)
        return self._check_loops(request)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """UsageError where ``prompt`` has no tokens, or one that there is not."""
        if not prompt:
            raise UsageError("the prompt has no tokens: give some text")
        n_vocab = self.model.config.vocab_size if self.n_vocab is None else self.n_vocab
        wrong = [token for token in prompt if not 0 <= token < n_vocab]
        if wrong:
            raise UsageError(f"the prompt has the token {wrong[0]}: this model has the ids 0 to {n_vocab - 1}")

    def _check_loops(self, request: Request) -> int:
        test = request.test
        asked = request.loops if request.loops is not None else self.model.config.n_loops
        n_loops = self.model.config.check_loops(asked if test is None or request.loops is not None else test.n_loops)
        if test is not None and (test.model is not self.model or test.n_loops != n_loops):
            raise UsageError(f"loops={n_loops}: the exit rule was built for another model, or for {test.n_loops} loops")
        if test is not None:
            # A recorded trace says here where it is too short, and not in a launch with others.
            none_1D = torch.zeros(1, self.model.config.d_model, device=self.runner.device)
            last = torch.tensor([len(request.prompt) + request.max_tokens - 2], device=self.runner.device)
            test.of_rows([request.row]).start(none_1D, Where(torch.zeros_like(last), last))
        if n_loops > self.n_loops:
            raise UsageError(f"loops={n_loops}: this engine keeps keys of {self.n_loops} loops; ask for no more")
        self.runner.prompts.reader([request], n_loops, 1).check_prefill(request.prefill)
        return n_loops

    def cancel(self, completion: Completion) -> None:
        """End a completion before the next launch; it keeps what it has. Safe from other threads."""
        self._cancelled.append(completion)

    # -- work ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Completion] | None:
        """One launch; the completions that have a new token or have ended, None where there is nothing to do."""
        began = perf_counter()
        self._changed = {}
        while self._arrived:
            completion = self._arrived.popleft()
            if completion.finish is None:  # it may have been cancelled since the last look at what was
                self.scheduler.add(completion)
        self._cancel()
        free = self.places - len(self.running)
        for completion in self.scheduler.admit(lambda one: self.runner.arena.reserve(one.n_tokens), free):
            self.running.add(completion)
            completion.began_s = monotonic()
            self._try([completion], lambda completion=completion: self.runner.open(completion))
        launch = self.scheduler.next()
        if launch is None:
            return list(self._changed) or None
        match launch:
            case Core(items):
                self._try(_completions(items), lambda: self._core(items), ("core", len(items)))
            case Piece(parts):
                n_tokens = sum(part.stop - part.start for part in parts)
                self._try([part.completion for part in parts], lambda: self._piece(parts), ("piece", n_tokens))
            case Coda(leaving, drafting):
                items = [*leaving, *drafting]
                self._try(_completions(items), lambda: self._coda(leaving, drafting), ("coda", len(items)))
        self.stats.wall_s += perf_counter() - began
        return list(self._changed)

    def run(self, requests: Iterable[Request]) -> list[list[Completion]]:
        """All completions of some requests, once they have ended."""
        asked = [self.submit(request) for request in requests]
        for _ in self.steps():
            pass
        return asked

    def steps(self) -> Iterator[list[Completion]]:
        """`step` until nothing is left to do."""
        with self.runner.passes():
            while (changed := self.step()) is not None:
                yield changed

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._arrived or self._cancelled) or not self.scheduler.is_idle

    @property
    def has_waiting(self) -> bool:
        """Whether a completion waits for a place."""
        return bool(self._arrived or self.scheduler.waiting)

    def check_idle(self) -> None:
        """AssertionError where something is still held once all is done."""
        arena = self.runner.arena
        assert self.scheduler.is_idle and not self.running, "requests are left"
        assert arena.n_free == arena.n_tokens, f"{arena.n_tokens - arena.n_free} tokens of the cache are not free"
        assert len(self.runner.free_rows) == self.places + self.options.width, "rows are not free"

    def _try(self, completions: list[Completion], launch: Any, like: tuple[str, int] | None = None) -> None:
        """A launch, of a kind and so many rows; where it fails, so do those that are in it, and nobody else."""
        try:
            with nullcontext() if self.threads is None or like is None else self.threads.launch(*like):
                launch()
        except Exception as error:
            reason = str(error) if isinstance(error, UsageError | RunError) else f"{type(error).__name__}: {error}"
            for completion in completions:
                self._end(completion, "error", reason)

    def _core(self, items: list[Item]) -> None:
        began = perf_counter()
        traced = [item for item in items if item.completion.request.trace]
        before_ND = self.runner.states(traced) if traced else None
        leaves = self.runner.loop(items)
        if before_ND is not None:
            self.runner.trace(traced, before_ND)
        self._took("core", len(items), began)
        self.scheduler.ran(items, leaves)

    def _piece(self, parts: list[Part]) -> None:
        began = perf_counter()
        logits_NV = self.runner.read(parts)
        n_tokens = sum(part.stop - part.start for part in parts)
        self._took("piece", n_tokens, began)
        self.stats.prompt_tokens += n_tokens
        done = [one for one, start, stop in parts if self.scheduler.read(one, stop - start)]
        if logits_NV is None:
            return
        begins: list[Item] = []
        for completion, one in zip(done, self._draw(logits_NV, [one.row() for one in done]), strict=True):
            self.stats.prompt_loops.update(completion.prompt_loops)
            token = self._keep(completion, one, completion.prompt_loops[-1], ())
            if token is not None:
                begins.append(self._next(completion, len(completion.request.prompt), token))
        self._begin(begins)

    def _coda(self, leaving: list[Item], drafting: list[Item]) -> None:
        began = perf_counter()
        items = [*leaving, *drafting]
        # What the rule has looked at is not made again.
        read = [item for item in items if item.readout is None]
        found = {item: item.readout for item in leaving if item.readout is not None}
        logits_NV: Tensor | None = None
        if read:
            logits_NV, source_ND = self.runner.read_out(read, [item.loops - 1 for item in read])
            sources = [None] * len(read) if source_ND is None else source_ND
            found |= {item: (logits_V, source) for item, logits_V, source in zip(read, logits_NV, sources, strict=True)}
        for item in leaving:
            source_D = found[item][1]
            if source_D is not None:
                self.runner.remember(item.completion, source_D)
        if logits_NV is None or len(read) < len(items):
            logits_NV = torch.stack([found[item][0] for item in items])
        drawn = self._draw(logits_NV, [item.completion.row(item.drafts()) for item in items])
        begins: list[Item] = []
        for item, one in zip(leaving, drawn, strict=False):
            begins += self._commit(item, one)
        for item, one in zip(drafting, drawn[len(leaving) :], strict=True):
            begins += self._draft(item, one)
        # A draft that was drawn before what it follows turned out wrong never begins.
        self._begin([item for item in begins if not item.dropped])
        self._took("coda", len(items), began)

    def _draw(self, logits_NV: Tensor, rows: list[Row]) -> list[Drawn | str]:
        return draw(logits_NV, rows, self.n_vocab)

    def _begin(self, items: list[Item]) -> None:
        if items:
            self.runner.begin(items)
            for item in items:
                self.scheduler.begin(item)

    def _commit(self, item: Item, drawn: Drawn | str) -> list[Item]:
        """A token is out of the loop and what follows it is drawn; what begins now."""
        completion, child = item.completion, item.child
        token = self._keep(completion, drawn, item.loops, tuple(item.steps))
        if token is None:
            return []
        self.runner.release([item])
        self.stats.checked += child is not None
        if child is not None and child.token == token:
            self.stats.accepted += 1
            completion.head = child
            self.scheduler.confirm(child)
            return []
        if child is not None:
            self._drop(child.family())
        return [self._next(completion, item.position + 1, token)]

    def _draft(self, item: Item, drawn: Drawn | str) -> list[Item]:
        completion = item.completion
        if completion.finish is not None or item.dropped:
            return []  # it was a draft of what has turned out otherwise in this launch
        item.drafted = item.loops
        token = None if isinstance(drawn, str) or drawn.token in completion.request.stop_ids else drawn.token
        item.barren = token is None
        if item.child is not None:
            if item.child.token == token:
                return []
            self._drop(item.child.family())  # it has changed its mind
            item.child = None
        if token is None:
            return []
        item.child = Item(completion, item.position + 1, token, parent=item)
        self.stats.drafts += 1
        return [item.child]

    def _next(self, completion: Completion, position: int, token: int) -> Item:
        completion.head = Item(completion, position, token)
        return completion.head

    def _keep(self, completion: Completion, drawn: Drawn | str, loops: int, steps: tuple[Any, ...]) -> int | None:
        """Add a drawn token to its completion; None where that has ended."""
        if isinstance(drawn, str):
            self._end(completion, "error", drawn)
            return None
        request = completion.request
        self.stats.loops[loops] += 1
        if drawn.token in request.stop_ids:
            completion.last = Token(drawn.token, loops, drawn.logprob, drawn.top, steps)
            self._end(completion, "stop")
            return None
        completion.tokens.append(Token(drawn.token, loops, drawn.logprob, drawn.top, steps))
        completion.ids.append(drawn.token)
        self.stats.tokens += 1
        self._changed[completion] = None
        try:
            halts = request.halt is not None and request.halt(completion, drawn.token)
        except Exception as error:  # it is the request's own, and no other's fault
            self._end(completion, "error", f"halt: {type(error).__name__}: {error}")
            return None
        if halts:
            self._end(completion, "stop")
        elif len(completion.tokens) >= request.max_tokens:
            self._end(completion, "length")
        return None if completion.finish is not None else drawn.token

    def _end(self, completion: Completion, finish: Finish, error: str | None = None) -> None:
        """A completion has ended: what it holds is free."""
        if completion.finish is not None:
            return
        completion.finish, completion.error = finish, error
        self.stats.failures += finish == "error"
        self._changed[completion] = None
        self.runner.release(self.scheduler.remove(completion))
        completion.head = completion.reader = completion.carried_LD = None
        if completion.span is not None:
            self.runner.arena.free(completion.span)
            completion.span = None
        self.running.discard(completion)
        test = completion.request.test
        if test is not None and all(one.request.test is not test for one in self.running):
            self.runner.kept.pop(test, None)

    def _drop(self, items: list[Item]) -> None:
        for item in items:
            self.scheduler.drop(item)
        self.runner.release(items)

    def _cancel(self) -> None:
        while self._cancelled:
            self._end(self._cancelled.pop(), "cancelled")

    # -- what launches take -------------------------------------------------------------------------------------------

    def _took(self, kind: str, rows: int, began: float) -> None:
        seconds = perf_counter() - began
        self.stats.launches[kind] += 1
        self.stats.rows[kind] += rows
        self.stats.seconds[kind] += seconds
        self.stats.model_s[kind] += self.runner.in_model.take()
        if kind in self._times:
            self._times[kind].add(rows, seconds)

    def _min_coda(self) -> int:
        """Tokens that a launch of the coda waits for."""
        if not self.options.refill:
            return self.options.width + 1
        if self.options.min_coda is not None:
            return self.options.min_coda
        n_running = min(self.scheduler.n_running, self.options.width)
        found = self._paces.get(n_running)
        if found is None or self.stats.tokens > 4 * found[0]:
            core, coda = (self._times[kind] for kind in ("core", "coda"))
            found = self.stats.tokens, best_min_coda(n_running, self.stats.loops, core, coda)
            self._paces[n_running] = found
        return found[1]

    def _piece_tokens(self, completion: Completion) -> int:
        """A memory's approximate prefills depend on how a prompt is cut: it is not."""
        prefill = completion.request.prefill
        whole = self.runner.carries and prefill is not None and not prefill.is_exact
        return len(completion.request.prompt) if whole else self.options.chunk_tokens

    def _kind(self, completion: Completion) -> Hashable:
        """Prompts of one kind are read alike, so that one pass can read several; None: it is read alone. Bits depend on
        what else is in a pass, and a cache of one slot for all loops has no such pass."""
        if self.options.deterministic or not self.options.cache.is_parallel:
            return None
        return completion.request.test, completion.n_loops, completion.request.prefill


def _completions(items: list[Item]) -> list[Completion]:
    return list(dict.fromkeys(item.completion for item in items))

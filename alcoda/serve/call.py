"""One HTTP request at work: its completions in the engine, its prompts that are scored, its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from alcoda.errors import RunError, UsageError
from alcoda.serve.errors import ApiError
from alcoda.serve.plan import Plan
from alcoda.serve.worker import LET_GO_S, Worker, given_up

if TYPE_CHECKING:
    from alcoda.engine.request import Completion
    from alcoda.engine.text import TextStream


@dataclass(eq=False)
class Choice:
    """One completion of a call.

    Attributes:
        index: in the answer.
        prompt: which of the call's prompts it follows.
        completion, text: None where nothing is to follow the prompt.
        n_chars, n_kept, n_tokens: of its text so far: characters, tokens that have part in them, tokens drawn. What is
            beyond them the engine's thread may be writing.
        finish: why it ended; None: it has not.
    """

    index: int
    prompt: int
    completion: Completion | None = None
    text: TextStream | None = None
    n_chars: int = 0
    n_kept: int = 0
    n_tokens: int = 0
    finish: str | None = None
    last_s: float | None = None

    @property
    def error(self) -> str | None:
        return None if self.completion is None else self.completion.error


@dataclass(eq=False)
class Call:
    """Of one plan.

    Attributes:
        began_s: when the HTTP request came.
        cut: ends its connection, whatever is still to be sent.
        scores: of each prompt, where they are asked for.
    """

    worker: Worker
    plan: Plan
    began_s: float
    cut: Callable[[], None]
    choices: list[Choice] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    _changed: list[Choice] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None
    _n_left: int = 0
    _n_held: int = 0
    _jobs: list[Future[Any]] = field(default_factory=list)
    _score: asyncio.Future[Any] | None = None
    _why: ApiError | None = None
    _timer: asyncio.TimerHandle | None = None
    _cutter: asyncio.TimerHandle | None = None

    # -- begin and end ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Ask the engine. The completions were let in (`Worker.enter`); each leaves as it ends.

        Raises:
            ApiError: 503, the engine has stopped.
        """
        plan, metrics = self.plan, self.worker.metrics
        assert self.worker.service is not None
        background = self.worker.service.background
        metrics.tiers.labels(plan.depth.tier or "none").inc()
        metrics.prompt_tokens.inc(sum(map(len, plan.prompts)))
        for p, request in enumerate(plan.requests):
            first = p * plan.n
            if request is None:
                self.choices += [Choice(first + i, p, finish="length") for i in range(plan.n)]
                self._n_held += plan.n  # until the prompt is scored
                continue
            made = [Choice(first + i, p) for i in range(plan.n)]
            self.choices += made
            try:
                completions = background.submit(request, lambda one, made=made: self._tell(made[one.stream], one))
            except RuntimeError:
                self.worker.leave(plan.n_choices - first)
                self.cancel(ApiError(503, "the engine has stopped", code="stopped"))
                return
            self._n_left += len(completions)
            for choice, completion in zip(made, completions, strict=True):
                choice.completion = completion
                choice.text = request.halt.of(completion)  # pyrefly: ignore
        if plan.timeout_s is not None:
            left_s = max(0.0, plan.timeout_s - (monotonic() - self.began_s))
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire)

    def cancel(self, why: ApiError) -> None:
        """End it: nobody waits for the answer, or it took too long. Who does not even read that is cut off."""
        if self._why is None:
            self._why = why
            self._cutter = asyncio.get_running_loop().call_later(LET_GO_S, self.cut)
        assert self.worker.service is not None
        for choice in self.choices:
            if choice.completion is not None and choice.finish is None:
                self.worker.service.background.cancel(choice.completion)
        for job in self._jobs:
            job.cancel()
        if self._score is not None:
            self._score.cancel()
        self._wake()

    def close(self) -> None:
        """It was answered, or will not be."""
        self.worker.leave(self._n_held)
        self._n_held = 0
        if any(choice.completion is not None and choice.finish is None for choice in self.choices):
            self.cancel(given_up())
        for job in self._jobs:
            job.cancel()
        for timer in (self._timer, self._cutter):
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        self.cancel(
            ApiError(
                408,
                f"the request took longer than its {self.plan.timeout_s} s",
                code="deadline_exceeded",
                headers={"x-should-retry": "false"},
            )
        )

    # -- work ---------------------------------------------------------------------------------------------------------

    async def score(self) -> None:
        """The log-probabilities of the prompts, in the engine's thread between its launches.

        Raises:
            ApiError: it was cancelled.
        """
        if not self.plan.scores:
            return
        from alcoda.serve.scoring import score_prompt

        assert self.worker.service is not None
        background, plan, lm = self.worker.service.background, self.plan, self.worker.lm
        known: dict[tuple[int, ...], Future[Any]] = {}
        for ids in plan.prompts:
            if ids not in known:
                try:
                    known[ids] = background.call(lambda ids=ids: score_prompt(lm, ids, plan))
                except RuntimeError:
                    raise ApiError(503, "the engine has stopped", code="stopped") from None
        self._jobs = list(known.values())
        for ids in plan.prompts:
            self._score = asyncio.wrap_future(known[ids])
            try:
                self.scores.append(await self._score)
            except asyncio.CancelledError:
                if self._score.cancelled():
                    raise self._why or ApiError(503, "the engine has stopped", code="stopped") from None
                raise
            except UsageError as error:
                raise ApiError(400, str(error), param="prompt", code="invalid_value") from None
            except RunError as error:
                raise ApiError(500, str(error), code="engine_error") from None

    async def changes(self) -> list[Choice]:
        """The choices that have new text, or have ended, as soon as there are any; none once all have.

        Raises:
            ApiError: it was cancelled, or one of them failed.
        """
        while self._n_left and not self._changed and self._why is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._why is not None:
            raise self._why
        changed = list(dict.fromkeys(self._changed))
        self._changed.clear()
        for choice in changed:
            if choice.finish == "error":
                raise ApiError(500, f"the engine failed: {choice.error}", code="engine_error")
            if choice.finish == "cancelled":
                raise ApiError(503, "the request was cancelled", code="cancelled")
        return changed

    @property
    def full_loops(self) -> int:
        """Of a token at full depth: the model's own, or what was asked for where that is more."""
        return max(self.worker.catalogue.n_loops, self.plan.depth.max_loops)

    @property
    def has_ended(self) -> bool:
        """Whether no more changes are to come."""
        return not self._n_left and not self._changed

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _tell(self, choice: Choice, completion: Completion) -> None:
        """In the engine's thread: what there is now, which only this thread changes."""
        text = completion.request.halt.of(completion)  # pyrefly: ignore
        if completion.finish is not None:
            text.finish()
        now = (len(text.text), text.n_kept, len(completion.tokens), completion.finish)
        self.worker.post(lambda: self._told(choice, *now))

    def _told(self, choice: Choice, n_chars: int, n_kept: int, n_tokens: int, finish: str | None) -> None:
        if choice.finish is not None:
            return
        self._time(choice, n_tokens)
        choice.n_chars, choice.n_tokens, choice.finish = n_chars, n_tokens, finish
        stopped = choice.text is not None and choice.text.stopped
        choice.n_kept = n_kept if finish is None or stopped else n_tokens
        if finish is not None:
            self._n_left -= 1
            self.worker.leave()
            self._count(choice)
        self._changed.append(choice)
        self._wake()

    # -- figures ------------------------------------------------------------------------------------------------------

    def _time(self, choice: Choice, n_tokens: int) -> None:
        if n_tokens <= choice.n_tokens:
            return
        now, metrics = monotonic(), self.worker.metrics
        if choice.last_s is None:
            metrics.first_s.observe(now - self.began_s)
            if choice.completion is not None and choice.completion.began_s is not None:
                metrics.queue_s.observe(choice.completion.began_s - self.began_s)
        else:
            metrics.next_s.observe((now - choice.last_s) / (n_tokens - choice.n_tokens))
        choice.last_s = now

    def _count(self, choice: Choice) -> None:
        metrics, completion = self.worker.metrics, choice.completion
        assert completion is not None
        metrics.finished.labels(choice.finish).inc()
        tokens, loops = spent(completion)
        metrics.tokens.inc(tokens)
        metrics.loops.inc(loops)
        metrics.full_loops.inc(tokens * self.full_loops)
        if choice.n_tokens and completion.finish in ("stop", "length"):
            with contextlib.suppress(RuntimeError):
                self.worker.audit(completion)


def spent(completion: Completion) -> tuple[int, int]:
    """Tokens that were drawn, the one that ended the text among them, and the loops that they ran."""
    drawn = [*completion.tokens, *([] if completion.last is None else [completion.last])]
    return len(drawn), sum(token.loops for token in drawn)

"""Models that the engine does not serve: their requests one after the other, by the reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from alcoda.engine.decode import decode
from alcoda.engine.options import Options
from alcoda.engine.refusals import refuses
from alcoda.engine.request import Completion, Request, Token
from alcoda.errors import RunError, UsageError
from alcoda.model.lm import RecurrentLM


class Alone:
    """Decodes as an `Engine` does, token by token of one completion at a time; the same `submit`, `steps`, `cancel`.

    Args:
        dtype, n_vocab: as of `Engine`.
        options: of these, ``cache`` counts; the wavefront is refused.
    """

    def __init__(
        self, model: RecurrentLM, options: Options, *, dtype: torch.dtype = torch.float32, n_vocab: int | None = None
    ) -> None:
        if options.draft_loops is not None:
            raise UsageError(
                f"draft_loops={options.draft_loops}: the engine cannot serve this model ({refuses(model)})"
            )
        self.model, self.options, self.dtype, self.n_vocab = model, options, dtype, n_vocab
        self._asked: list[tuple[Completion, Iterator[int], list[Tensor]]] = []

    def submit(self, request: Request) -> list[Completion]:
        """As `Engine.submit`; all that cannot be is refused at once."""
        if request.trace or request.sampling.logprobs is not None or request.n != 1:
            raise UsageError(
                f"trace, logprobs and n are of the engine, which cannot serve this model: {refuses(self.model)}; leave "
                "them out"
            )
        config, test = self.model.config, request.test
        loops = request.loops or (config.n_loops if test is None else test.n_loops)
        completion, depths = Completion(request, 0, loops), []
        (stop,) = request.stop_ids or (None,)
        tokens = decode(
            self.model,
            request.prompt,
            loops=loops,
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            stop=stop,
            n_vocab=self.n_vocab,
            dtype=self.dtype,
            prefill=request.prefill,
            rule=test,
            depths=depths,
            cache=self.options.cache,
        )
        self._asked.append((completion, tokens, depths))
        return [completion]

    def cancel(self, completion: Completion) -> None:
        """As `Engine.cancel`."""
        completion.finish = completion.finish or "cancelled"

    def steps(self) -> Iterator[list[Completion]]:
        """As `Engine.steps`, a token at a time."""
        while self._asked:
            completion, tokens, depths = self._asked.pop(0)
            for _ in self._decode(completion, tokens, depths):
                yield [completion]

    def _decode(self, completion: Completion, tokens: Iterator[int], depths: list[Tensor]) -> Iterable[None]:
        request = completion.request
        try:
            for token in tokens:
                if completion.finish is not None:
                    return
                loops = int(depths[-1][0, -1]) if depths else completion.n_loops
                if not completion.prompt_loops:
                    first = depths[0][0].tolist() if depths else [completion.n_loops] * len(request.prompt)
                    completion.prompt_loops += first
                completion.tokens.append(Token(token, loops))
                completion.ids.append(token)
                if request.halt is not None and request.halt(completion, token):
                    completion.finish = "stop"
                    return
                yield
            full = len(completion.tokens) >= request.max_tokens
            completion.finish = completion.finish or ("length" if full else "stop")
        except RunError as error:
            completion.finish, completion.error = "error", str(error)
        yield

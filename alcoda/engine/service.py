"""A loaded model behind `asyncio`: prompts that come at any time share one engine's launches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from alcoda.engine.background import Background
from alcoda.engine.capacity import check_room
from alcoda.engine.generated import Generated, Texts
from alcoda.engine.options import Options
from alcoda.engine.request import Request
from alcoda.errors import RunError, UsageError
from alcoda.training.device import free_memory_bytes

if TYPE_CHECKING:
    from alcoda.engine.llm import LM


class Service:
    """One engine of a model, in a thread of its own while it is entered.

    >>> with alcoda.load("mini").service() as service:
    ...     async for piece in service.stream("The fox", exit="balanced"):
    ...         print(piece, end="")

    Args:
        options: of the engine.
        loops: that any request may run; the model's own where None.

    Raises:
        UsageError: a model that the engine cannot serve, options that take more memory than is free.
    """

    def __init__(self, lm: LM, options: Options = Options(), loops: int | None = None) -> None:
        free_bytes = free_memory_bytes(lm.model.embed.weight.device)
        check_room(lm.model, options, loops or lm.n_loops, lm.loaded.decode_dtype, free_bytes)
        self.lm = lm
        self.background = Background(lm.new_engine(options, loops))

    def __enter__(self) -> Service:
        self.background.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.background.stop()

    async def stream(self, prompt: str, **how: Any) -> AsyncIterator[str]:
        """The text that follows ``prompt``, piece by piece as it comes, each piece whole characters; arguments as
        `LM.request`, of one completion. It is cancelled where the caller leaves before its end.

        Raises:
            UsageError: an argument that cannot be.
            RunError: it failed on the way.
        """
        request = self.lm.request(prompt, **how)
        if request.n != 1:
            raise UsageError(f"n={request.n} in a stream: one completion; generate gives more")
        texts, given = _texts(request), 0
        async for completion in self.background.stream(request):
            text = texts.of(completion)
            if completion.finish is not None:
                text.finish()
            if len(text.text) > given:
                yield text.text[given:]
                given = len(text.text)
            if completion.error is not None:
                raise RunError(completion.error)
            if completion.finish == "cancelled":  # not by who reads this: they would have left
                raise RunError("the engine was stopped before the text had ended")

    async def generate(self, prompt: str, **how: Any) -> list[Generated]:
        """All completions of a prompt once they have ended; arguments as `LM.request`. One that failed says why
        (``error``).

        Raises:
            UsageError: an argument that cannot be.
        """
        request = self.lm.request(prompt, **how)
        texts, ended = _texts(request), []
        async for completion in self.background.stream(request):
            if completion.finish is not None:
                ended.append(completion)
        ended.sort(key=lambda completion: completion.stream)
        return [Generated.of(completion, prompt, texts) for completion in ended]


def _texts(request: Request) -> Texts:
    assert isinstance(request.halt, Texts)
    return request.halt

"""A model as a server, from Python. Apart from `alcoda.api`, which takes seconds to import: the port opens before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alcoda.config import validate
from alcoda.serve.server import Server
from alcoda.serve.settings import Policy, Settings

if TYPE_CHECKING:
    from alcoda.engine.llm import LM

__all__ = ["Server", "server"]


def server(
    run: str | Path | LM,
    *,
    policy: Policy | Mapping[str, Any] | str | Path | None = None,
    engine: Mapping[str, Any] | None = None,
    checkpoint: str = "best",
    decode_only: bool = False,
    **settings: Any,
) -> Server:
    """A server of a model (docs/serving.md), which `Server.run` or ``with`` starts.

    >>> with alcoda.server("mini", port=0) as server:
    ...     print(server.url)

    Args:
        run: a run folder, the name of a model that comes with the package, or a loaded model.
        policy: tiers by API key and depth under load (`alcoda.serve.settings.Policy`), or a YAML file of it.
        engine: fields of `alcoda.engine.engine.Options`.
        checkpoint, decode_only: of a run that is named, as of `alcoda.load`.
        settings: fields of `alcoda.serve.settings.Settings`: host, port, api_keys, max_waiting, ...

    Raises:
        UsageError: a setting that cannot be. What the model cannot do is said when it is loaded.
    """
    if isinstance(policy, str | Path):
        policy = Policy.load(Path(policy))
    fields = {**settings, **({} if policy is None else {"policy": policy})}
    found = validate(Settings, {name: _plain(value) for name, value in fields.items()}, "serve")

    def load() -> LM:
        from alcoda.engine.llm import LM, load

        return run if isinstance(run, LM) else load(run, checkpoint, decode_only=decode_only)

    return Server(load, found, dict(engine or {}))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

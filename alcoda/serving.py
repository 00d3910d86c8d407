"""A model as a server, from Python. Apart from `alcoda.api`, which takes seconds to import: the port opens before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alcoda.config import validate
from alcoda.errors import UsageError
from alcoda.serve.server import Server
from alcoda.serve.settings import Policy, Settings

if TYPE_CHECKING:
    from alcoda.data.vocabulary import TokenizerConfig
    from alcoda.engine.llm import LM

__all__ = ["Server", "server"]

NO_TEXT = (
    "{path} has no tokenizer, and a server answers texts: put the model's tokenizer.json beside its weights (a "
    "tokenizer.model is to be converted first: transformers' AutoTokenizer.from_pretrained(FOLDER)"
    ".save_pretrained(FOLDER)); a run that was imported without one is to be imported again. lm.logits(ids) needs none"
)


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
        engine: fields of `alcoda.engine.options.Options`.
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
        from alcoda.data.vocabulary import NoTokenizer
        from alcoda.engine.llm import LM, load

        is_loaded = isinstance(run, LM)
        if isinstance(run.recipe.data.tokenizer if is_loaded else _tokenizer(run), NoTokenizer):
            raise UsageError(NO_TEXT.format(path=run.loaded.run.path if is_loaded else run))
        return run if is_loaded else load(run, checkpoint, decode_only=decode_only)

    return Server(load, found, dict(engine or {}))


def _tokenizer(path: str | Path) -> TokenizerConfig:
    """Of a run or a folder of another project; no weights are read."""
    from alcoda.interop.foreign import is_foreign
    from alcoda.interop.hub import find_folder
    from alcoda.interop.load import open_any
    from alcoda.interop.text import tokenizer_of
    from alcoda.training.run import RunFolder

    if is_foreign(path):
        return tokenizer_of(open_any(find_folder(path)))[0]
    return RunFolder.find(path).recipe().data.tokenizer


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

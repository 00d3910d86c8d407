"""Choices from outside: a Python file or module that registers choices on axes (`alcoda.config.Choice`) when it runs.

A recipe is data and never names code to run. Code comes from who types the command (``--plugin my.py``), from who calls
`load`, or from an installed distribution with an entry point in the group ``alcoda.plugins``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from alcoda import progress
from alcoda.config import Choice
from alcoda.data.corpora import FORMS
from alcoda.errors import UsageError

GROUP = "alcoda.plugins"


class Plugin(NamedTuple):
    """What was loaded.

    Attributes:
        name: of the file (without its folder), or of the module.
        sha256: of the file's bytes; None for a module without a file.
        registered: ``axis: kind`` of every choice that it brought.
    """

    name: str
    sha256: str | None
    registered: tuple[str, ...]


_LOADED: dict[str, Plugin] = {}
"""By module name."""
_entry_points_are_loaded = False


def load(path_or_module: str | Path) -> Plugin:
    """Run a plugin, so that the choices that it defines can be named in recipes.

    A file that was loaded already and has not changed is not run again.

    Args:
        path_or_module: a Python file, or the name of a module that can be imported.

    Raises:
        UsageError: no such file or module, or an error in it (its line and message); nothing of it stays registered.
    """
    path = Path(path_or_module).expanduser()
    if path.suffix == ".py" or path.is_file() or len(path.parts) > 1:
        return _load_file(path)
    name = str(path_or_module)
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # no such parent, or no name at all
        found = None
    if found is None:
        raise UsageError(
            f"--plugin {name}: there is no module of that name to import, and no such file. Give the path of a Python "
            "file (my.py), or the name of an installed module"
        )
    return _import(name, f"the plugin {name}")


def load_entry_points() -> None:
    """`load` every installed plugin; the first call does it, before the first recipe is read.

    Raises:
        UsageError: one of them is broken; names its distribution.
    """
    global _entry_points_are_loaded
    if _entry_points_are_loaded:
        return
    for point in entry_points(group=GROUP):
        _import(point.module, _whose(point))
    _entry_points_are_loaded = True


def used() -> list[dict[str, Any]]:
    """What was loaded so far, for the record of a run."""
    return [plugin._asdict() for plugin in _LOADED.values()]


def changed(recorded: list[dict[str, Any]]) -> list[str]:
    """The plugins of an earlier session's `used` that are others now, or are not loaded."""
    now = {plugin.name: plugin.sha256 for plugin in _LOADED.values()}
    return [one["name"] for one in recorded if now.get(one["name"]) != one["sha256"]]


def _load_file(path: Path) -> Plugin:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--plugin {path}: cannot read it: {error.strerror or error}") from None
    # The place decides the name: two files called my.py in two folders are two plugins.
    name = f"alcoda_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    digest = hashlib.sha256(source).hexdigest()
    if name in _LOADED and _LOADED[name].sha256 == digest:
        return _LOADED[name]

    def run() -> ModuleType:
        module = ModuleType(name)
        module.__file__ = str(path)
        before = sys.modules.get(name)
        sys.modules[name] = module  # pydantic looks there for what annotations name
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            if before is not None:
                sys.modules[name] = before
            raise
        return module

    return _registering(run, f"the plugin {path}", str(path), path.name, digest)


def _import(name: str, what: str) -> Plugin:
    if name in _LOADED:
        return _LOADED[name]
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    origin = found.origin if found and found.has_location else None
    digest = hashlib.sha256(Path(origin).read_bytes()).hexdigest() if origin else None
    return _registering(lambda: importlib.import_module(name), what, origin, name, digest)


def _registering(run: Callable[[], ModuleType], what: str, file: str | None, name: str, digest: str | None) -> Plugin:
    before = _registered()
    with _undone_on_error():
        try:
            module = run()
            brought = _brought(module, before)
            for choice in brought.values():
                if issubclass(choice, Choice):
                    choice.model_rebuild()  # annotations that pydantic could not read yet: now or never
        except (Exception, SystemExit) as error:
            raise UsageError(f"{what} failed{_place(error, file)}: {_message(error)}") from error
    if not brought:
        progress.say(f"{what} registers no choice: define a subclass of an axis in it (class My(Inject): kind: ...)")
    _LOADED[module.__name__] = plugin = Plugin(name, digest, tuple(brought))
    return plugin


def _brought(module: ModuleType, before: dict[str, type]) -> dict[str, type]:
    """What is new, and what the module itself defines (it may have been imported already); alcoda's own is not."""
    return {
        key: choice
        for key, choice in _registered().items()
        if (before.get(key) is not choice and choice.__module__.split(".")[0] != "alcoda")
        or f"{choice.__module__}.".startswith(f"{module.__name__}.")
    }


def _registries() -> Iterator[tuple[str, dict[str, type]]]:
    for axis in Choice.__subclasses__():
        yield axis.axis, axis.choices  # pyrefly: ignore
    yield "corpus", FORMS  # pyrefly: ignore


def _registered() -> dict[str, type]:
    return {f"{axis}: {kind}": choice for axis, choices in _registries() for kind, choice in choices.items()}


@contextmanager
def _undone_on_error() -> Generator[None]:
    before = [(choices, dict(choices)) for _, choices in _registries()]
    try:
        yield
    except BaseException:
        for choices, old in before:
            # What was imported of alcoda meanwhile stays imported, and so stays registered.
            kept = {kind: choice for kind, choice in choices.items() if choice.__module__.split(".")[0] == "alcoda"}
            choices.clear()
            choices.update(old | {kind: choice for kind, choice in kept.items() if kind not in old})
        raise


def _place(error: BaseException, file: str | None) -> str:
    """`` in line 3`` of the plugin's own file; another file by its name."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f" in line {error.lineno}" + ("" if error.filename == file else f" of {error.filename}")
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _message(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _whose(point: EntryPoint) -> str:
    distribution = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
    return f"the plugin {point.value} of {distribution} (entry point {point.name!r}; update or uninstall it)"

"""The code that goes along with an exported model, so that transformers runs it without alcoda (``trust_remote_code``).

It is not another model: `hf_model` and every module of ours that it needs are copied as they are, each into one file of
the folder, and only the names of our modules in their imports change (``alcoda.model.keys`` is
``.alcoda_model_keys``). What they need besides is torch, transformers, pydantic and safetensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from alcoda.files import write_text
from alcoda.model.config import ModelConfig

PACKAGE = __name__.partition(".")[0]
SOURCES = Path(__file__).parents[1]
ROOT, ROOT_FILE = f"{PACKAGE}.interop.hf_model", "modeling_alcoda"
AUTO_MAP = {"AutoConfig": f"{ROOT_FILE}.AlcodaConfig", "AutoModelForCausalLM": f"{ROOT_FILE}.AlcodaForCausalLM"}
"""The entry of config.json by which transformers finds the classes. One file has both, because the version of a folder
that transformers imports depends on the file: a config from another file would be of another class."""


def write_code(folder: Path, model: ModelConfig) -> bool:
    """Write the files into ``folder``; False, and none is, where the model has choices of a plugin, whose code is not
    ours to copy."""
    if outside(model):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        write_text(folder / name, text)
    return True


def outside(config: BaseModel) -> list[str]:
    """The choices in a config that are not of alcoda itself, as ``axis: kind``."""
    found = [] if type(config).__module__.startswith(f"{PACKAGE}.") else [f"{config.axis}: {config.kind}"]  # pyrefly: ignore
    return found + [one for _, value in config if isinstance(value, BaseModel) for one in outside(value)]


@cache
def files() -> dict[str, str]:
    """Every file by its name."""
    modules = _needed()
    return {f"{_file(name)}.py": _portable(name, module, sorted(modules)) for name, module in modules.items()}


class _Module(NamedTuple):
    """A module of ours: its text, and the imports from our modules in it."""

    text: str
    imports: list[ast.ImportFrom]


def _needed() -> dict[str, _Module]:
    """`ROOT` and all that it imports of ours, by name."""
    found: dict[str, _Module] = {}
    left = [ROOT]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = module = _read(name)
            left += [str(one.module) for one in module.imports]
    return found


def _read(name: str) -> _Module:
    text = _path(name).with_suffix(".py").read_text(encoding="utf-8")
    return _Module(text, list(_imports(name, ast.parse(text))))


def _path(name: str) -> Path:
    """Where a module lies, without the ending; nothing is imported for it, least of all transformers."""
    return SOURCES.joinpath(*name.split(".")[1:])


def _imports(name: str, tree: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports from our modules; the forms that cannot be copied into one flat folder are not used in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any(alias.name.partition(".")[0] == PACKAGE for alias in node.names), f"{name}:{node.lineno}"
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{name}:{node.lineno}"
            if node.module.partition(".")[0] == PACKAGE:
                assert _path(node.module).with_suffix(".py").is_file(), (
                    f"{name}:{node.lineno}"
                )  # no module of a package
                yield node


def _file(name: str) -> str:
    """The file, without its ending, that a module of ours becomes."""
    return ROOT_FILE if name == ROOT else name.replace(".", "_")


def _portable(name: str, module: _Module, others: list[str]) -> str:
    """The text of a file."""
    lines = module.text.splitlines(keepends=True)
    for node in module.imports:
        at = node.lineno - 1
        lines[at] = lines[at].replace(f"from {node.module} import", f"from .{_file(str(node.module))} import", 1)
    head = f"# {name} of alcoda {_version()}, copied with the model (SPDX-License-Identifier: Apache-2.0).\n"
    if name == ROOT:
        # transformers copies the files that this one names, and not in every version those that they name in turn.
        named = {str(node.module) for node in module.imports}
        lines += ["\n\n", "# The files that the others need:\n"]
        lines += [f"from .{_file(one)} import __name__ as _  # noqa\n" for one in others if one not in named | {ROOT}]
    return head + "".join(lines)


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "from source"

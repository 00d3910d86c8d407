"""The chat template of a tokenizer: found in a folder, and made to stand alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alcoda.errors import RunError

TEMPLATE = "chat_template.jinja"
CONFIG = "tokenizer_config.json"
SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""What templates call the special tokens of their tokenizer."""
_SET = re.compile(r"\{% set (\w+) = \"[^\n]*\" %\}\n")


def find_template(folder: Path) -> str | None:
    """The chat template of a folder, standing alone (`alone`): `chat_template.jinja`, or ``chat_template`` of
    `tokenizer_config.json` (of several, the one named default). None where it has none.

    Raises:
        RunError: a file that is no text.
    """
    config, path = _config(folder / CONFIG), folder / TEMPLATE
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if path.is_file():
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f"{path} cannot be read as text ({error}): put back the template, or take it away") from None
    return alone(template, config) if isinstance(template, str) else None


def alone(template: str, specials: Mapping[str, Any]) -> str:
    """A template that does not depend on what the tokenizer beside it calls its special tokens: those that it mentions
    are set at its beginning.

    Args:
        specials: by name, strings or mappings with ``content``, as `tokenizer_config.json` has them.
    """
    at, done = 0, set[str]()
    while (found := _SET.match(template, at)) is not None:  # it stands alone already
        at, done = found.end(), done | {found[1]}
    lines = [
        f"{{% set {name} = {json.dumps(_text(specials[name]), ensure_ascii=False)} %}}\n"
        for name in SPECIALS
        if name not in done and specials.get(name) and re.search(rf"\b{name}\b", template)
    ]
    return "".join(lines) + template


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)

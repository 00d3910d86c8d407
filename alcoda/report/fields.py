"""Checked access to parsed JSON: what is absent is absent, what has the wrong type is a damaged file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from alcoda.errors import RunError


class Fields:
    """The fields of one JSON object; ``where`` names it in messages. A field that is null counts as absent."""

    def __init__(self, data: Any, where: str) -> None:
        """Raises `RunError` if ``data`` is not an object."""
        if not isinstance(data, dict):
            raise RunError(f"{where}: an object is needed, not {_shown(data)}")
        self.data: dict[str, Any] = data
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def _get(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RunError(f"{self.where}: {key} has to be {what}, not {_shown(value)}")
        return value

    def number(self, key: str) -> int | float:
        """The number at ``key``, which has to be there."""
        value = self.maybe_number(key)
        if value is None:
            raise RunError(f"{self.where}: {key} is missing (a number)")
        return value

    def maybe_number(self, key: str) -> int | float | None:
        """The number at ``key``, or None."""
        return self._get(key, (int, float), "a number")

    def integer(self, key: str) -> int:
        """The number at ``key``, which has to be there and be whole."""
        value = self.number(key)
        if value != value or value in (float("inf"), float("-inf")) or value != int(value):
            raise RunError(f"{self.where}: {key} has to be a whole number, not {_shown(value)}")
        return int(value)

    def text(self, key: str, default: str = "") -> str:
        """The string at ``key``, or ``default``."""
        value = self._get(key, str, "a string")
        return default if value is None else value

    def flag(self, key: str) -> bool | None:
        """The true or false at ``key``, or None."""
        return self._get(key, bool, "true or false")

    def child(self, key: str) -> Fields:
        """The object at ``key``, without fields where it is absent."""
        return Fields({} if self.data.get(key) is None else self.data[key], f"{self.where}: {key}")

    def children(self, key: str) -> list[Fields]:
        """The objects of the list at ``key``, none where it is absent."""
        return objects(self._get(key, list, "a list") or [], f"{self.where}: {key}")

    def texts(self, key: str) -> tuple[str, ...]:
        """The list at ``key`` as strings."""
        return tuple(str(item) for item in self._get(key, list, "a list") or [])

    def numbers(self, key: str) -> tuple[float, ...]:
        """The list of numbers at ``key``, empty where it is absent."""
        items = self._get(key, list, "a list of numbers") or []
        if not all(isinstance(item, int | float) for item in items):
            raise RunError(f"{self.where}: {key} has to be a list of numbers, not {_shown(items)}")
        return tuple(float(item) for item in items)

    def plain(self) -> dict[str, str]:
        """Every field as a string, in order, for a table."""
        return {key: str(value) for key, value in self.data.items() if value is not None}


def objects(data: Any, where: str) -> list[Fields]:
    """The objects of a JSON list. Raises `RunError` if it is not one."""
    if not isinstance(data, list):
        raise RunError(f"{where}: a list is needed, not {_shown(data)}")
    return [Fields(item, f"{where}[{index}]") for index, item in enumerate(data)]


def load(path: Path) -> Any:
    """The JSON value of a file. Raises `RunError` if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: this is not readable JSON ({error})") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

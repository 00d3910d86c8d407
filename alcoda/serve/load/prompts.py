"""The prompts that a load is made of."""

from __future__ import annotations

import json
from pathlib import Path

from alcoda.errors import UsageError

BUILT_IN = (
    "Once upon a time there was a little girl who lived at the edge of a wood,",
    "The king had three sons, and the youngest of them",
    "When the rain had stopped, the old bear came out of his den and said:",
    "Every morning the miller went down to the river to",
    "There was once a fox who was so clever that",
    'She opened the door, and there stood a tall man in a green coat. "Good evening," he said,',
    "A boat lay on the sand, and nobody knew whose it was.",
    "On the other side of the mountain the snow was deep, and the travellers",
    "The dog ran to the gate and barked, for he had heard",
    "Long ago, before there were any roads, the people of the valley",
    "He looked at the clock. It was nearly midnight, and still",
    "In the garden behind the house there grew an apple tree which",
    "The captain shut his book and looked out over the sea.",
    "Two mice sat in the kitchen and talked about the cat.",
    "It was the coldest winter that anybody could remember, and",
    "My grandmother used to tell us that the moon",
)
"""Openings of stories, 9 to 17 words each: the text that the shipped model knows."""


def read_prompts(path: Path) -> tuple[str, ...]:
    """Prompts from a file: one a line; of a ``.jsonl`` file, the entry ``prompt`` of each line.

    Raises:
        UsageError: no such file, one that is not text, a line without a prompt, or no prompt at all.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise UsageError(f"--prompt-file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--prompt-file {path}: not UTF-8 text; one prompt a line is needed") from None
    if not lines:
        raise UsageError(f"--prompt-file {path}: it is empty; one prompt a line is needed")
    if path.suffix != ".jsonl":
        return tuple(lines)
    return tuple(_of_json(line, f"--prompt-file {path}, prompt {i}") for i, line in enumerate(lines, 1))


def _of_json(line: str, where: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where}: no JSON ({error})") from None
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UsageError(f'{where}: an object with a text as "prompt" is needed')
    return prompt

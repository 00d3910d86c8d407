"""Which of the processes that torchrun started this is: what it says in the environment. No torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from alcoda.errors import UsageError


class Place(NamedTuple):
    """Of ``world_size`` processes this is number ``rank``, on its host number ``local_rank``; all from 0."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def place() -> Place:
    """The place of this process; of a process that torchrun did not start: the only one.

    Raises:
        UsageError: the environment holds something else than torchrun writes.
    """
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    if not {"RANK", "WORLD_SIZE"} <= found.keys():  # one of them alone is some other program's
        return Place()
    try:
        here = Place(int(found["RANK"]), int(found["WORLD_SIZE"]), int(found.get("LOCAL_RANK", 0)))
    except ValueError:
        here = Place(0, 0)
    if not 0 <= here.rank < here.world_size or here.local_rank < 0:
        raise UsageError(
            f"the environment says {', '.join(f'{name}={value}' for name, value in found.items())}, which no torchrun "
            "writes: start many processes with torchrun -m alcoda train, or unset these for one"
        )
    return here


def is_main() -> bool:
    """Whether this process is the one that speaks and writes: rank 0."""
    try:
        return place().rank == 0
    except UsageError:  # somebody has to say it
        return True

"""What the engine cannot do with a model, and what to do in its place."""

from __future__ import annotations

from alcoda.errors import UsageError
from alcoda.model.lm import RecurrentLM


def refuses(model: RecurrentLM) -> str | None:
    """Why an engine cannot serve a model; None where it can."""
    config = model.config
    if config.route.gathers:
        return f"route {config.route.kind!r} picks tokens out of whole texts"
    if config.has_weights_by_loop:
        return (
            f"sharing {config.sharing.kind!r}: loops have weights of their own, and tokens at several loops run as one"
        )
    return None


def check_serves(model: RecurrentLM) -> None:
    """UsageError where an engine cannot serve a model."""
    reason = refuses(model)
    if reason is not None:
        raise UsageError(
            f"the engine cannot serve this model: {reason}. LM.generate decodes it all the same, a text at a time"
        )


def check_drafts(model: RecurrentLM) -> None:
    """UsageError where drafts cannot be checked: what is remembered of a token is known once it is out of the loop."""
    config = model.config
    source = config.memory_source
    if config.memory.carries and source is not None and source[0] != "prelude":
        raise UsageError(
            f"draft_loops with a memory of {source[0]!r}: what follows a token needs what it becomes after the loop, "
            "so it cannot be drafted before; leave draft_loops out, or train with memory.source prelude.I"
        )
    if not config.is_recurrent:
        raise UsageError("draft_loops: this model is dense (n_core=0) and has no loop to draft in; leave it out")

"""What happens inside the loop: one pass over a little validation text, with hooks on the parts of the model.

Of every loop it takes the size of the state, how much the loop changed it, and whatever a part reports of itself: any
child of the model may define

    def describe(self, args: tuple, out) -> dict[str, Tensor]

``args`` are the positional arguments of its forward pass and ``out`` what that returned. A tensor of any shape is
logged by its mean and its quantiles, one without dimensions as it is. (Parts run once a loop; one that runs once a pass
is logged at the first loop.)
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from alcoda import progress
from alcoda.data.splits import Stream
from alcoda.model.lm import RecurrentLM
from alcoda.model.state import State
from alcoda.training.device import autocast

MOST_TOKENS = 1024
"""Read from the beginning of the validation text: the same at every validation."""
QUANTILES = {"q10": 0.1, "q50": 0.5, "q90": 0.9}


def diagnose(
    model: RecurrentLM, stream: Stream, train_step: int, dtype: torch.dtype, n_loops: int | None = None
) -> list[dict[str, Any]]:
    """A record a loop of one pass at ``n_loops`` (the model's where None); none for a dense model.

    ``{"type": "diagnostics", "train_step": ..., "loop": 1 .. n_loops, "loops": n_loops, NAME.mean: ..., NAME.q10: ...,
    NAME.q50: ..., NAME.q90: ...}`` with the names

    * ``state_norm``: root mean square of the new state, of each token;
    * ``state_change``: ``|h_new - h| / |h|`` of each token; left out where h is zero;
    * ``PART.NAME`` of what a part describes.

    Numbers that are not finite are left out. The model, its mode and every random state are as before.
    """
    if not model.config.is_recurrent:
        return []
    n_loops, device = n_loops or model.config.n_loops, model.embed.weight.device
    ids_BT = _slice(stream, model.config.seq_len).to(device)
    found: list[dict[str, float]] = [{} for _ in range(n_loops)]
    was_training = model.training
    model.eval()
    try:
        # A part that draws where it should not would otherwise move the noise of the training steps that follow.
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            _hooked(model, found),
            autocast(device, dtype),
        ):
            next(model.readouts(ids_BT, [n_loops]))
    finally:
        model.train(was_training)
    about = {"type": "diagnostics", "train_step": train_step}
    return [{**about, "loop": i, "loops": n_loops, **values} for i, values in enumerate(found, 1) if values]


def _slice(stream: Stream, seq_len: int) -> Tensor:
    n_rows = max(min(MOST_TOKENS, stream.n_tokens) // seq_len, 1)
    tokens = stream.read(0, min(n_rows * seq_len, MOST_TOKENS, stream.n_tokens)).astype(np.int64)
    return torch.from_numpy(tokens).view(n_rows, -1)


@contextmanager
def _hooked(model: RecurrentLM, found: list[dict[str, float]]) -> Generator[None]:
    handles = []
    try:
        for name, child in model.named_children():
            if child is model.route:
                handles.append(child.register_forward_hook(_Hook("", _state, found)))
            if callable(getattr(child, "describe", None)):
                handles.append(child.register_forward_hook(_Hook(f"{name}.", _described, found)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hook:
    """Takes what ``read`` makes of each call of one part; the calls count the loops."""

    def __init__(self, prefix: str, read: Any, found: list[dict[str, float]]) -> None:
        self.prefix, self.read, self.found, self.loop = prefix, read, found, 0

    def __call__(self, part: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self.loop < len(self.found):
            try:
                for name, tensor in self.read(part, args, out).items():
                    self.found[self.loop].update(summary(f"{self.prefix}{name}", tensor))
            except Exception as error:  # a part that cannot describe itself is not to end the run
                if self.loop == 0:
                    where = f"{self.prefix}describe".removesuffix(".")
                    progress.say(f"no diagnostics of {where}: {type(error).__name__}: {error}")
        self.loop += 1


def _state(part: nn.Module, args: tuple[Any, ...], out: State) -> dict[str, Tensor]:
    """Of the route, which runs a whole loop: (step, state, e, loop, context) -> state."""
    before_BTD, after_BTD = args[1].h_BTD.float(), out.h_BTD.float()
    change_BT = torch.linalg.vector_norm(after_BTD - before_BTD, dim=-1) / torch.linalg.vector_norm(before_BTD, dim=-1)
    return {"state_norm": after_BTD.square().mean(-1).sqrt(), "state_change": change_BT}


def _described(part: Any, args: tuple[Any, ...], out: Any) -> dict[str, Tensor]:
    return part.describe(args, out)


def summary(name: str, tensor: Tensor) -> dict[str, float]:
    """``NAME.mean`` and ``NAME.q10 .. q90`` of the finite numbers of a tensor; ``NAME`` of one without dimensions."""
    values = tensor.detach().float().cpu().numpy()
    if values.ndim == 0:
        return {name: float(values)} if math.isfinite(values) else {}
    values = values[np.isfinite(values)].astype(np.float64)
    if not values.size:
        return {}
    quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
    return {f"{name}.mean": float(values.mean())} | {
        f"{name}.{q}": value for q, value in zip(QUANTILES, quantiles, strict=True)
    }

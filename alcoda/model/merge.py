"""A model whose core has an adapter as the same model without it."""

from __future__ import annotations

import torch

from alcoda.model.lm import RecurrentLM
from alcoda.model.recurrence.sharing import AdaptedLoops, LoraLinear


@torch.no_grad()
def merged(model: RecurrentLM) -> RecurrentLM:
    """With ``W + B A`` in the place of each W: equal but for rounding, and as dear as a model that never had adapters.
    A model without them is returned as it is."""
    if not isinstance(model.config.sharing, AdaptedLoops):
        return model
    weights = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            up, down = weights.pop(f"{name}.up"), weights.pop(f"{name}.down")
            weights[f"{name}.weight"] = torch.addmm(weights[f"{name}.weight"], up[0], down[0])
    with torch.device("meta"):
        new = RecurrentLM(model.config.model_copy(update={"sharing": "tied"}))
    new.load_state_dict(weights, assign=True)
    return new.train(model.training)

"""The model that laws are checked on, and what a law needs to know of its config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alcoda.model.config import ModelConfig
from alcoda.model.keys import Context
from alcoda.model.lm import RecurrentLM
from alcoda.training.recipe import Recipe

VOCAB = 64
"""Ids that laws draw: every model under a law has as many."""
MOST_TOKENS = 16
"""The longest text that laws run: every model under a law has room for it."""

EXACT = 1e-10
"""In fp64, of sums that are taken in another order."""


@dataclass(frozen=True)
class Subject:
    """What a law is checked on.

    Attributes:
        config: of the model, at the size that is checked.
        seed: of its weights.
        recipe: where one was given: how the model is trained.
        compiled: whether laws of the compiler are asked for.
    """

    config: ModelConfig
    seed: int = 0
    recipe: Recipe | None = None
    compiled: bool = False

    def model(self) -> RecurrentLM:
        """A new one, in fp64 and evaluation mode, with memories where a law names none."""
        return make(self.config, self.seed)


def make(config: ModelConfig, seed: int = 0) -> RecurrentLM:
    """`make_plain`, `reminded`."""
    return reminded(make_plain(config, seed))


def make_plain(config: ModelConfig, seed: int = 0) -> RecurrentLM:
    """An fp64 model in evaluation mode. Every parameter is random: zero biases and unit norms would hide faults."""
    model = RecurrentLM(config).double().init(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            if name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif p.dim() == 1:
                p.copy_(1 + 0.3 * noise)
            else:
                p.add_(0.05 * noise)
    return model.eval()


def reminded(model: RecurrentLM) -> RecurrentLM:
    """The same model, with random memories where a pass names none, by token id: with zero ones, what projects and
    weighs memories would be under no law. They are causal, and the same in chunks."""
    if model.config.memory.carries:
        shape, enter = (VOCAB, model.config.d_model), model.memory.enter
        told_VD = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

        def tell(context: Context, x0_BTD: Tensor, memory_BTD: Tensor | None) -> Context:
            told_BTD = told_VD[context.ids_BT % VOCAB].to(x0_BTD) if memory_BTD is None else memory_BTD
            return enter(context, x0_BTD, told_BTD)

        model.memory.enter = tell
    return model


def tokens(n_rows: int, n_tokens: int, seed: int = 0) -> Tensor:
    """Random ids ``[n_rows, n_tokens]``."""
    return torch.randint(0, VOCAB, (n_rows, n_tokens), generator=torch.Generator().manual_seed(seed))


# -- what a config declares -------------------------------------------------------------------------------------------


def at_most(config: ModelConfig, n_loops: int) -> int:
    """``n_loops``, or the most that the model can run."""
    return n_loops if config.max_loops is None else min(n_loops, config.max_loops)


def depths(config: ModelConfig, wanted: tuple[int, ...] = (1, 3)) -> tuple[int, ...]:
    """The depths that a law looks at, increasing: those ``wanted``, cut to what the model can run."""
    return tuple(sorted({at_most(config, n_loops) for n_loops in wanted}))


DEEP = (1, 3, 9)
"""Depths of the laws that a fault of late loops would break."""
LONG = 40
"""Tokens of the texts of the laws that a fault of far positions would break."""


def long_text(config: ModelConfig) -> int:
    """``LONG``, or as many tokens as the model has room for."""
    return min(LONG, config.seq_len)


def bitwise(config: ModelConfig) -> float:
    """What equality to the bit may be off by: nothing, or `EXACT` where rows are gathered."""
    return EXACT if config.route.gathers else 0.0


def is_causal(config: ModelConfig, trains: bool) -> bool:
    """Whether the model declares that no token sees a later one."""
    return config.route.causal_in_training if trains else config.route.causal_at_eval


# -- laws that say nothing about a model ------------------------------------------------------------------------------


def needs_loops(subject: Subject) -> str | None:
    """The exception of laws on several loops."""
    if not subject.config.is_recurrent:
        return "the model is dense and has no loop"
    return "the model has one loop" if at_most(subject.config, 2) < 2 else None


def declares_leak(subject: Subject, trains: bool) -> str | None:
    """The exception of laws on causality."""
    if is_causal(subject.config, trains):
        return None
    when = "in training" if trains else "at evaluation"
    return f"declared: route {subject.config.route.kind} is not causal {when}"


def leaks_at_eval(subject: Subject) -> str | None:
    """The exception of laws on decoding."""
    return declares_leak(subject, trains=False)


def has_no_own_depth(subject: Subject) -> str | None:
    """The exception of the law on rows of their own depth."""
    return None if subject.config.max_loops is None else "loops have weights of their own: all rows run the same ones"

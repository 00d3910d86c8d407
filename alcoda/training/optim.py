"""Optimizers by parameter group, and the learning rate over time. All of it is torch's own."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from alcoda.config import Choice, Config, NonNegativeFloat, NonNegativeInt, PositiveFloat
from alcoda.errors import UsageError
from alcoda.training import shard

Beta = Annotated[NonNegativeFloat, Field(lt=1)]
Share = Annotated[NonNegativeFloat, Field(le=1)]


class OptimizerConfig(Choice, axis="optimizer"):
    """How gradients become steps."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        """One or two optimizers that between them own every parameter that learns once, and no other."""
        raise NotImplementedError

    def gathered(self, model: nn.Module) -> list[Tensor]:
        """The parameters whose updates are made from the whole, wherever their parts lie."""
        return []

    def state_bytes(self, model: nn.Module) -> int:
        """What they keep between steps once all of them have taken one; ``model`` may be on the meta device."""
        raise UsageError(f"train.optimizer {self.kind!r} does not say how much it keeps (state_bytes)")


class AdamW(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019). Weight decay acts on matrices and embeddings, not on vectors."""

    kind: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1

    def build(self, model: nn.Module) -> list[Optimizer]:
        return [self.over([p for p in model.parameters() if p.requires_grad])]

    def state_bytes(self, model: nn.Module) -> int:
        return self.state_bytes_over([p for p in model.parameters() if p.requires_grad])

    def state_bytes_over(self, parameters: list[nn.Parameter]) -> int:
        """Of some of the parameters: two moments of each number, and the number of steps of each tensor (fp32)."""
        return sum(2 * p.numel() * p.element_size() + 4 for p in parameters)

    def over(self, parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer over some of the parameters."""
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


class Muon(OptimizerConfig):
    """torch's Muon (Jordan et al. 2024) for the matrices of the blocks, gate and adapter; AdamW for all else."""

    kind: Literal["muon"] = "muon"
    lr: PositiveFloat = 0.02
    momentum: PositiveFloat = 0.95
    weight_decay: NonNegativeFloat = 0.1
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How the step scales with a matrix's shape (torch.optim.Muon)."""
    adamw: AdamW = AdamW()
    """For embeddings, head, norms and biases."""

    def build(self, model: nn.Module) -> list[Optimizer]:
        matrices, rest = self._split(model)
        built: list[Optimizer] = []
        if matrices:  # with trainable, one of the two may have nothing to do
            kind = WholeMuon if shard.is_part(matrices[0]) else torch.optim.Muon
            muon = kind(
                matrices,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                adjust_lr_fn=self.adjust_lr_fn,
            )
            built.append(muon)
        return [*built, self.adamw.over(rest)] if rest else built

    def gathered(self, model: nn.Module) -> list[Tensor]:
        return self._split(model)[0]

    def state_bytes(self, model: nn.Module) -> int:
        matrices, rest = self._split(model)
        return sum(p.numel() * p.element_size() for p in matrices) + self.adamw.state_bytes_over(rest)

    def _split(self, model: nn.Module) -> tuple[list[Tensor], list[nn.Parameter]]:
        """What Muon steps, and what AdamW does."""
        matrices = [
            module.weight
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not model.head and module.weight.requires_grad
        ]
        owned = {id(p) for p in matrices}
        return matrices, [p for p in model.parameters() if p.requires_grad and id(p) not in owned]


class WholeMuon(torch.optim.Muon):
    """torch's Muon on sharded matrices. Momentum stays sharded; each update is gathered, orthogonalised whole on every
    process, and put back in parts (orthogonalised in parts it would be another update)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """As torch's; with no closure."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                change = _orthogonal_change(update.full_tensor(), group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(shard.split(change, p))


def _orthogonal_change(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What torch's Muon adds to a matrix for this update (without decay): its own step, of a matrix of zeros."""
    change = nn.Parameter(torch.zeros_like(update))
    change.grad = update
    same = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([change], momentum=0.0, nesterov=False, weight_decay=0.0, **same).step()
    return change.detach()


class Schedule(Config):
    """Linear warm-up to the full rate, then decay towards ``final`` times it: the step after the last would have it."""

    warmup_steps: NonNegativeInt = 100
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    decay_fraction: Share = 1.0
    """The share of the steps after warm-up, at the end, over which the rate decays; before, it stays at its peak."""
    final: Share = 0.1

    def factor(self, train_step: int, n_steps: int) -> float:
        """What the learning rate of step ``train_step`` (0-based) is multiplied by."""
        if train_step < self.warmup_steps:
            return (train_step + 1) / self.warmup_steps
        span = max((n_steps - self.warmup_steps) * min(self.decay_fraction, 1.0), 1)
        done = min(max((train_step - (n_steps - span)) / span, 0.0), 1.0)
        shape = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}[self.decay]
        return self.final + (1 - self.final) * shape

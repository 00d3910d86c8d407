"""Sharing: how much of the core's weights the loops have in common."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Choice, PositiveInt
from alcoda.model.blocks import Stack
from alcoda.model.init import InitSpecial
from alcoda.model.shape import Cost, Kept


class Sharing(Choice, axis="sharing"):
    """Which weights loop r runs with."""

    is_tied: ClassVar[bool] = True
    """Whether every loop is the same function, so that any number of them can run."""
    shares_stack: ClassVar[bool] = True
    """Whether the loops have the stack's weights in common (beside what each has of its own)."""

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> TiedModule | UntiedModule:
        """A module with ``at(loop)``, the stack that a loop runs, and ``touch(y, n_run)``."""
        raise NotImplementedError

    def cost(self, stack: Cost, n_loops: int) -> Cost:
        """What is added to the cost of one stack: parameters stored, FLOPs a loop."""
        return Cost()

    def kept_weight_bytes(self, n_matrix_params: int, kept: Kept) -> int:
        """Bytes of weights that each loop makes for itself and keeps for its backward pass; ``n_matrix_params`` are
        those of the stack's linear maps."""
        return 0


class TiedLoops(Sharing):
    """One stack for all loops."""

    kind: Literal["tied"] = "tied"

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> TiedModule:
        return TiedModule(make_stack())


class LoraLoops(Sharing):
    """One stack, and for each loop r and each linear map in it a term of rank k: ``W x + B_r A_r x`` (RRT, papers.md
    5.4). A starts normal (variance 1 / d_in), B zero. Loops beyond ``n_loops`` have no term and do not exist.
    """

    kind: Literal["lora"] = "lora"
    is_tied: ClassVar[bool] = False
    rank: PositiveInt = 8

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> TiedModule:
        return LoraModule(make_stack(), self.rank, n_loops)

    def cost(self, stack: Cost, n_loops: int) -> Cost:
        return Cost(params=n_loops * self.rank * stack.sides, flops=2 * self.rank * stack.sides)

    def kept_weight_bytes(self, n_matrix_params: int, kept: Kept) -> int:
        return n_matrix_params * kept.product  # W + B_r A_r


class AdaptedLoops(Sharing):
    """One stack for all loops, and beside each linear map in it a term of rank k, the same at every loop: ``W x + B A
    x`` (LoRA, arXiv 2106.09685, without its scale). For fine-tuning; `alcoda.model.merge` puts the term into W.
    """

    kind: Literal["adapter"] = "adapter"
    rank: PositiveInt = 8

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> TiedModule:
        return TiedModule(_with_terms(make_stack(), self.rank, 1))

    def cost(self, stack: Cost, n_loops: int) -> Cost:
        return Cost(params=self.rank * stack.sides, flops=2 * self.rank * stack.sides)

    def kept_weight_bytes(self, n_matrix_params: int, kept: Kept) -> int:
        return n_matrix_params * kept.product  # W + B A


class UntiedLoops(Sharing):
    """A stack for each of the ``n_loops`` loops: the ablation (CART's unshared core). No loop exists beyond them."""

    kind: Literal["untied"] = "untied"
    is_tied: ClassVar[bool] = False
    shares_stack: ClassVar[bool] = False

    def build(self, make_stack: Callable[[], Stack], n_loops: int) -> UntiedModule:
        return UntiedModule([make_stack() for _ in range(n_loops)])

    def cost(self, stack: Cost, n_loops: int) -> Cost:
        return Cost(params=(n_loops - 1) * stack.params)


class TiedModule(nn.Module):
    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self.stack = stack

    def at(self, loop: int | Tensor) -> Stack:
        """The stack of loop ``loop``, 0-based; a tensor where rows are at different loops, which tied ones may be."""
        return self.stack

    def touch(self, y_BTD: Tensor, n_run: int) -> Tensor:
        """``y_BTD``, with a part of weight zero in it from each parameter that ``n_run`` loops did not use: training in
        parallel waits for the gradient of every parameter."""
        return y_BTD


class UntiedModule(nn.Module):
    def __init__(self, stacks: list[Stack]) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(stacks)

    def at(self, loop: int | Tensor) -> nn.Module:
        return self.stacks[int(loop)]

    def touch(self, y_BTD: Tensor, n_run: int) -> Tensor:
        idle = [p.flatten()[0] for stack in list(self.stacks)[n_run:] for p in stack.parameters()]
        return y_BTD + 0 * torch.stack(idle).sum() if idle and torch.is_grad_enabled() else y_BTD


class LoraModule(TiedModule):
    def __init__(self, stack: Stack, rank: int, n_loops: int) -> None:
        super().__init__(_with_terms(stack, rank, n_loops))
        self._at: dict[int, Stack] = {}

    def at(self, loop: int | Tensor) -> Stack:
        """The stack as loop ``loop`` runs it: other modules, the same parameters. Nothing is switched over, so that
        threads may be at different loops."""
        loop = int(loop)
        if loop not in self._at:
            self._at[loop] = stack = _at_loop(self.stack, loop)
            if self.stack._compiled_call_impl is not None:
                stack.compile()
        return self._at[loop]

    def train(self, mode: bool = True) -> LoraModule:
        self._at.clear()  # the mode is no parameter: copies would keep the old one
        return super().train(mode)


def _with_terms(stack: Stack, rank: int, n_loops: int) -> Stack:
    """The same stack, its linear maps with terms of low rank."""
    for module in list(stack.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoraLinear(child, rank, n_loops))
    return stack


def _at_loop(module: Any, loop: int) -> Any:
    """A copy of a module tree that shares its parameters, whose `LoraLinear` maps are at ``loop``."""
    new = copy.copy(module)
    new._modules = {name: None if child is None else _at_loop(child, loop) for name, child in module._modules.items()}
    if isinstance(new, LoraLinear):
        new.loop = loop
    return new


class LoraLinear(nn.Linear, InitSpecial):
    """``W x (+ b) + B_r A_r x``."""

    loop = 0
    """Whose term is added, 0-based."""

    def __init__(self, linear: nn.Linear, rank: int, n_loops: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.down = nn.Parameter(torch.empty(n_loops, rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(n_loops, linear.out_features, rank))

    def init_special(self) -> None:
        self.down.normal_(std=self.in_features**-0.5)
        self.up.zero_()

    def forward(self, input: Tensor) -> Tensor:
        down, up = self.down[self.loop], self.up[self.loop]
        if torch.is_grad_enabled() and self._should_merge(input):
            with torch.autocast(input.device.type, enabled=False):  # W + B A is rounded once, not B A on its own
                weight = torch.addmm(self.weight, up, down)
            return F.linear(input, weight, self.bias)
        y, u = super().forward(input).flatten(0, -2), F.linear(input, down).flatten(0, -2)
        return torch.addmm(y, u, up.T).unflatten(0, input.shape[:-1])

    def _should_merge(self, input: Tensor) -> bool:
        """Whether ``(W + B_r A_r) x`` is less work than ``W x + B_r (A_r x)``. Asked in training only: elsewhere a row
        must not depend, in its last bits, on how many others it runs with. The meta device counts the formula."""
        n_tokens = input.numel() // self.in_features
        is_less = n_tokens * (self.in_features + self.out_features) > self.in_features * self.out_features
        return is_less and not input.is_meta

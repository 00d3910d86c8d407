"""Route: which tokens run a loop (Mixture-of-Recursions, papers.md 5.4). Tokens that are out cost nothing.

The tokens that run are gathered, looped and put back; the others keep their state and drop out of attention at that
depth. Rows with fewer of them than the longest are filled up with tokens whose results are thrown away.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alcoda.config import Bool, Choice, NonNegativeFloat, NonNegativeInt
from alcoda.model.gather import put_tokens, tokens_at
from alcoda.model.keys import Context
from alcoda.model.precision import Fp32Linear, in_fp32
from alcoda.model.shape import Cost, Kept, Shape, linear
from alcoda.model.state import Run, State


class Route(Choice, axis="route"):
    """Which tokens run a loop."""

    gathers: ClassVar[bool] = True
    """Whether rows are gathered: results then depend on batch-mates in the last bits."""
    causal_in_training: ClassVar[bool] = True
    """Whether a token's route depends on no later token."""
    shares_router: ClassVar[bool] = True
    """Whether the loops have the router's weights in common."""
    reads_anchor: ClassVar[bool] = False
    """Whether it decides on the prelude's output, before the first loop: what it then knows keeps its gradient where
    loops carry none."""

    @property
    def drops_keys(self) -> bool:
        """Whether tokens that are out drop out of attention at that depth."""
        return False

    @property
    def causal_at_eval(self) -> bool:
        """Whether a token's route at evaluation depends on no later token: decoding needs it."""
        return True

    def build(self, shape: Shape, n_loops: int) -> RouteModule:
        raise NotImplementedError

    def cost(self, shape: Shape, n_loops: int) -> Cost:
        """Parameters, and FLOPs a token once a pass."""
        return Cost()

    def loop_flops(self, shape: Shape) -> int:
        """FLOPs a token and loop."""
        return 0

    def kept_bytes(self, shape: Shape, kept: Kept, share: float) -> float:
        """Bytes a token that one loop keeps for its backward pass where ``share`` of the tokens run it, beside what
        the loop itself keeps of those."""
        return 0

    def warming(self, train_step: int) -> int | None:
        """``train_step`` while the route warms up, None after."""
        return None

    def n_run(self, loop: int, n_loops: int, n_tokens: int, train_step: int | None = None) -> float:
        """How many of the ``n_tokens`` of a sequence are expected to run loop ``loop``, 0-based. ``train_step`` None:
        after any warm-up."""
        return n_tokens


class AllTokens(Route):
    """Every token runs every loop."""

    kind: Literal["none"] = "none"
    gathers: ClassVar[bool] = False

    def build(self, shape: Shape, n_loops: int) -> RouteModule:
        return RouteModule()


class Routed(Route):
    """What the two routers have in common: ``h = h + g u`` or ``h = h + g (u - h)``, u what the loop makes of h."""

    apply: Literal["add", "blend"] = "add"
    """add: as MoR's expert choice (u contains h already); blend: g interpolates, so the state keeps its size."""
    weight: NonNegativeFloat = 0.01
    """Of the auxiliary loss."""
    drop_keys: Bool = True
    """Tokens that are out drop out of attention at that depth (MoR's recursion-wise caching), where with keys per_loop
    they have no key. False, for anchor keys: they stay to be seen."""

    @property
    def drops_keys(self) -> bool:
        return self.drop_keys

    def kept_bytes(self, shape: Shape, kept: Kept, share: float) -> float:
        return share * 4 * shape.d_model  # what the loop makes of the tokens that run, to be weighed by g


class TokenChoice(Routed):
    """One router, before the first loop, gives each token its number of loops: the likeliest of 1 .. R. Causal.

    Ours, where papers.md has no equation: g weighs every loop that the token runs, as in expert choice.

    g is the chosen score. The auxiliary loss balances the choices: ``R sum_i f_i p_i``, f_i the share of tokens that
    choose i, p_i its mean score (Switch Transformer's, as in MoR).
    """

    kind: Literal["token_choice"] = "token_choice"
    reads_anchor: ClassVar[bool] = True
    score: Literal["softmax", "sigmoid"] = "softmax"

    def build(self, shape: Shape, n_loops: int) -> RouteModule:
        return TokenChoiceModule(self, shape.d_model, n_loops)

    def cost(self, shape: Shape, n_loops: int) -> Cost:
        return linear(shape.d_model, n_loops)

    def n_run(self, loop: int, n_loops: int, n_tokens: int, train_step: int | None = None) -> float:
        return n_tokens * max(n_loops - loop, 0) / n_loops  # balanced choices


class ExpertChoice(Routed):
    """At each loop the ``(R - r) / R`` of the sequence with the highest ``g = sigmoid(w_r . h)`` run, among the tokens
    still in (r 0-based).

    The top of a sequence depends on later tokens: not causal in training. So a second decision is learnt for
    evaluation, by binary cross-entropy against being in the top: of g itself (``auxiliary: loss``, as MoR) or of a
    router beside it that moves nothing else (``router``); a token runs where it is above 1/2, and in the first loop in
    any case. With ``none`` evaluation takes the top too, and leaks: for experiments, not for decoding.
    """

    kind: Literal["expert_choice"] = "expert_choice"
    causal_in_training: ClassVar[bool] = False
    shares_router: ClassVar[bool] = False
    auxiliary: Literal["loss", "router", "none"] = "loss"
    warmup_steps: NonNegativeInt = 0
    """Train steps over which capacity falls from the whole sequence to its share."""

    @property
    def causal_at_eval(self) -> bool:
        return self.auxiliary != "none"

    def build(self, shape: Shape, n_loops: int) -> RouteModule:
        return ExpertChoiceModule(self, shape.d_model, n_loops)

    def cost(self, shape: Shape, n_loops: int) -> Cost:
        return Cost(params=self._n_routers() * n_loops * shape.d_model)

    def loop_flops(self, shape: Shape) -> int:
        return self._n_routers() * 2 * shape.d_model

    def kept_bytes(self, shape: Shape, kept: Kept, share: float) -> float:
        return super().kept_bytes(shape, kept, share) + 4 * shape.d_model  # the state that the router reads

    def _n_routers(self) -> int:
        return 2 if self.auxiliary == "router" else 1

    def warming(self, train_step: int) -> int | None:
        return train_step if train_step < self.warmup_steps else None

    def n_run(self, loop: int, n_loops: int, n_tokens: int, train_step: int | None = None) -> int:
        share = max((n_loops - loop) / n_loops, 0)
        if train_step is not None and self.warming(train_step) is not None:
            share = 1 + (share - 1) * train_step / self.warmup_steps
        return max(1, round(share * n_tokens))


class RouteModule(nn.Module):
    """All tokens."""

    train_step: int | None = None
    """Set by the trainer, for what warms up; None: no warm-up."""

    def start(self, e_BTD: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What is known of each token before the first loop, [B, T] each, and an auxiliary loss a token."""
        return (), None

    def forward(self, step: Run, state: State, e_BTD: Tensor, loop: int, context: Context) -> State:
        """``step`` on the tokens that run this loop."""
        return step(state, e_BTD, loop, context)


class RoutedModule(RouteModule):
    def __init__(self, config: Routed) -> None:
        super().__init__()
        self.config = config

    def run(
        self,
        step: Run,
        state: State,
        e_BTD: Tensor,
        loop: int,
        context: Context,
        runs_BT: Tensor,
        gain_BT: Tensor,
        n_run: int | None = None,
    ) -> State:
        """Gather the tokens that run, loop them, weigh the result, put it back. What the router knows stays as it is.

        Args:
            runs_BT, gain_BT: which tokens run, and their g.
            n_run: how many run in every row, where that is known; None: it is counted (a wait, on a GPU).
        """
        n_most = int(runs_BT.sum(1).max()) if n_run is None else n_run
        # Those that run first, in their order; behind them, where a row has fewer, others to fill it up.
        index_BK = (~runs_BT).to(torch.int8).argsort(dim=1, stable=True)[:, :n_most]
        inner = context.some(index_BK, runs_BT, exact=n_run is not None)
        if n_most == 0:
            return state
        whole = State(state.h_BTD, state.kept)
        some = whole.map(lambda x: tokens_at(x, index_BK))
        new = step(some, tokens_at(e_BTD, index_BK), loop, inner)
        dtype = torch.promote_types(some.h_BTD.dtype, new.h_BTD.dtype)
        gain_BK1 = tokens_at(gain_BT, index_BK)[..., None].to(dtype)
        old_BKD, u_BKD = some.h_BTD.to(dtype), new.h_BTD.to(dtype)
        u_BKD = u_BKD if self.config.apply == "add" else u_BKD - old_BKD
        new = new._replace(h_BTD=torch.addcmul(old_BKD, gain_BK1, u_BKD))
        runs_BK = tokens_at(runs_BT, index_BK)

        def kept(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(runs_BK.view(*runs_BK.shape, *[1] * (new.dim() - 2)), new, old.to(new.dtype))

        if n_run is None:
            new = new.merge(some, kept)
        whole = whole.merge(new, lambda x, x_new: put_tokens(x, index_BK, x_new))
        # Put back too, what the router knows would lose its gradient in a loop that carries none.
        return state._replace(h_BTD=whole.h_BTD, kept=whole.kept)

    def describe(self, args: tuple[object, ...], out: State) -> dict[str, Tensor]:
        """The share of tokens that ran the loop."""
        before, loop = args[1], args[3]
        assert isinstance(before, State) and isinstance(loop, int)
        return {"share": self.runs(before, loop)[0].double().mean()}

    def runs(self, state: State, loop: int) -> tuple[Tensor, Tensor]:
        """Which tokens run the loop, and their g."""
        raise NotImplementedError


class TokenChoiceModule(RoutedModule):
    def __init__(self, config: TokenChoice, d_model: int, n_loops: int) -> None:
        super().__init__(config)
        self.choice = config
        self.router = Fp32Linear(d_model, n_loops, bias=False)

    def start(self, e_BTD: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        logits_BTR = in_fp32(self.router, e_BTD)
        score_BTR = logits_BTR.softmax(-1) if self.choice.score == "softmax" else logits_BTR.sigmoid()
        gain_BT, choice_BT = score_BTR.max(-1)
        if not self.training:
            return (choice_BT + 1, gain_BT), None
        n_choices = logits_BTR.size(-1)
        chosen_R = F.one_hot(choice_BT, n_choices).flatten(0, 1).to(score_BTR.dtype).mean(0)
        share_BTR = score_BTR / score_BTR.sum(-1, keepdim=True)
        aux_BT = self.choice.weight * n_choices * (share_BTR * chosen_R).sum(-1)
        return (choice_BT + 1, gain_BT), aux_BT

    def runs(self, state: State, loop: int) -> tuple[Tensor, Tensor]:
        n_BT, gain_BT = state.route
        return n_BT > loop, gain_BT

    def forward(self, step: Run, state: State, e_BTD: Tensor, loop: int, context: Context) -> State:
        return self.run(step, state, e_BTD, loop, context, *self.runs(state, loop))


class ExpertChoiceModule(RoutedModule):
    def __init__(self, config: ExpertChoice, d_model: int, n_loops: int) -> None:
        super().__init__(config)
        self.choice = config
        self.n_loops = n_loops
        self.router = Fp32Linear(d_model, n_loops, bias=False)
        self.second = Fp32Linear(d_model, n_loops, bias=False) if config.auxiliary == "router" else None

    def start(self, e_BTD: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        here_BT = torch.ones(e_BTD.shape[:2], dtype=torch.bool, device=e_BTD.device)
        return (here_BT,), torch.zeros(e_BTD.shape[:2], dtype=e_BTD.dtype, device=e_BTD.device)

    def n_run(self, loop: int, n_tokens: int) -> int:
        """k_r, the tokens of a sequence that run loop ``loop`` in training."""
        return self.choice.n_run(loop, self.n_loops, n_tokens, self.train_step if self.training else None)

    def takes_top(self) -> bool:
        return self.training or not self.choice.causal_at_eval

    def logits(self, state: State, loop: int) -> tuple[Tensor, Tensor]:
        """Of g, and of the decision at evaluation, [B, T] each."""
        row = slice(loop, loop + 1)
        logit_BT = in_fp32(self.router, state.h_BTD, row)[..., 0]
        if self.second is None:
            return logit_BT, logit_BT
        # A router that moves nothing else: no gradient goes on into the state.
        return logit_BT, in_fp32(self.second, state.h_BTD.detach(), row)[..., 0]

    def runs(self, state: State, loop: int) -> tuple[Tensor, Tensor]:
        return self._chosen(state, loop, *self.logits(state, loop))

    def _chosen(self, state: State, loop: int, logit_BT: Tensor, second_BT: Tensor) -> tuple[Tensor, Tensor]:
        (here_BT,) = state.route
        if not self.takes_top():
            return here_BT & (second_BT > 0) if loop > 0 else here_BT, torch.sigmoid(logit_BT)
        k = self.n_run(loop, here_BT.size(1))
        top_BK = logit_BT.detach().masked_fill(~here_BT, float("-inf")).topk(k, dim=1).indices
        return torch.zeros_like(here_BT).scatter(1, top_BK, True), torch.sigmoid(logit_BT)

    def forward(self, step: Run, state: State, e_BTD: Tensor, loop: int, context: Context) -> State:
        logit_BT, second_BT = self.logits(state, loop)
        runs_BT, gain_BT = self._chosen(state, loop, logit_BT, second_BT)
        aux_BT, here_BT = state.aux_BT, state.route[0]
        assert aux_BT is not None
        if self.training and self.choice.causal_at_eval:
            loss_BT = F.binary_cross_entropy_with_logits(second_BT, runs_BT.to(second_BT.dtype), reduction="none")
            aux_BT = aux_BT + self.choice.weight * loss_BT * here_BT
        n_run = self.n_run(loop, here_BT.size(1)) if self.takes_top() else None
        state = state._replace(route=(runs_BT,), aux_BT=aux_BT)
        return self.run(step, state, e_BTD, loop, context, runs_BT, gain_BT, n_run)

"""Fits a probe: a logistic regression on the normed state that foretells whether later loops still matter (A2).

papers.md 3.2: one weight for all loops and a bias a loop, on a part of the text (``probe``) that the model did not see.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from alcoda import progress
from alcoda.depth.record import Label, ProbeWeights, fingerprint
from alcoda.depth.rules import Probe
from alcoda.depth.watch import PROBE_EPS
from alcoda.errors import UsageError, did_you_mean
from alcoda.measure.replays import Passage
from alcoda.training.device import autocast
from alcoda.training.load import LoadedRun
from alcoda.training.score import nats, rows_between

STATES_BYTES = 256 << 20
"""Of states held at one time; of longer texts a random part is used."""
HELD_OUT = 0.2
"""The last part of the text, which the fit does not see."""
LEAST_TOKENS = 500
DECAY = 1e-4
"""Of the squared weights, beside a mean loss: what keeps separable labels from growing them without end."""
N_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Held-out states whose probability lies in one tenth: how many, their mean probability, how often it was true."""

    n: int
    probability: float
    share: float


@dataclass(frozen=True)
class LoopLabel:
    """After one loop, held out: the share of tokens whose label is true, and the area under the ROC curve, None where
    all are alike."""

    loop: int
    share: float
    auc: float | None


@dataclass(frozen=True)
class ProbeResult:
    """What `fit_probe` did, its figures on held-out text.

    Attributes:
        label, delta: what is foretold (`alcoda.depth.record.ProbeWeights`).
        data, train_step, n_loops: of what text, checkpoint and depth.
        n_fitted, n_held_out: states (a token after a loop).
        share: of held-out states whose label is true.
        accuracy: at probability 1/2; that of always saying what is likelier is max(share, 1 - share).
        auc: area under the ROC curve.
        loss, base_loss: nats a state; base: of the share of each loop alone.
        calibration_error: mean distance of probability and frequency over ``bins``.
    """

    path: str
    label: Label
    delta: float
    data: str
    train_step: int
    n_loops: int
    n_fitted: int
    n_held_out: int
    share: float
    accuracy: float
    auc: float | None
    loss: float
    base_loss: float
    calibration_error: float
    bins: tuple[Bin, ...]
    by_loop: tuple[LoopLabel, ...]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return asdict(self)


class States(NamedTuple):
    """Normed states of N tokens after each loop but the last, ``[N, R - 1, D]``, and their labels."""

    x_NRD: Tensor
    true_NR: Tensor


def fit_probe(
    run: LoadedRun,
    label: str = "argmax_changes",
    delta: float = 0.01,
    loops: int | None = None,
    data: str = "probe",
    *,
    out: Path | None = None,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Fit a probe and save it in the run (or at ``out``), bound to the weights of the model.

    Args:
        label: ``argmax_changes`` in a later loop; or ``loss_falls``: a later loop lowers the loss by ``delta`` nats.
        loops: of the deepest that is looked at; the model's where None.
        seed: of which tokens are used, where states of all do not fit.

    Raises:
        UsageError: a model without loops to leave, or with a memory; a label that is true of all states, or of none;
            a text that is too short.
    """
    known = get_args(Label)
    if label not in known:
        raise UsageError(f"label {label!r}{did_you_mean(label, known)}")
    if not 0 <= delta < float("inf"):
        raise UsageError(f"delta={delta}: nats, 0 or more")
    config = run.model.config
    n_loops = config.n_loops if loops is None else loops
    Probe().check(config, n_loops)
    if n_loops < 2:
        raise UsageError("a probe foretells later loops, and only 1 runs: give loops of 2 or more")
    if config.memory.carries:
        raise UsageError("a probe is fitted to whole rows, and a memory is read token by token: choose exit state")
    text = Passage.open(run, data, max_tokens, batch_size, LEAST_TOKENS)
    states = _states(text, n_loops, label, delta, seed)
    n_fit = round((1 - HELD_OUT) * len(states.x_NRD))
    fit, held = (States(*(x[part] for x in states)) for part in (slice(n_fit), slice(n_fit, None)))
    if float(fit.true_NR.double().mean()) in (0.0, 1.0):
        always = "all" if bool(fit.true_NR.any()) else "no"
        raise UsageError(
            f"label {label}: it is true of {always} states of {data}, so that nothing can be told apart. Choose the "
            f"other label ({', '.join(one for one in known if one != label)}), another delta, or more text"
        )
    weight_D, bias_R = logistic(fit.x_NRD, fit.true_NR)
    # The last loop has no later one: it takes the bias of the one before, and is never asked.
    weights = ProbeWeights(weight_D, torch.cat([bias_R, bias_R[-1:]]), label, fingerprint(run.model), delta)  # pyrefly: ignore
    path = run.run.writable().probe if out is None else out
    weights.save(path)
    found = {"path": str(path), "label": label, "delta": delta, "data": data, "train_step": run.train_step}
    return _result(found, n_loops, weight_D, bias_R, fit, held)


@torch.no_grad()
def _states(text: Passage, n_loops: int, label: str, delta: float, seed: int) -> States:
    run, model = text.run, text.run.model
    seq_len, device = run.recipe.model.seq_len, model.embed.weight.device
    n_most = max(1, STATES_BYTES // (4 * run.model.config.d_model * (n_loops - 1)))
    scored_N = np.flatnonzero(text.bytes_N > 0)
    kept_N = np.zeros(text.n_tokens, dtype=bool)
    rng = np.random.default_rng(seed)
    kept_N[scored_N if len(scored_N) <= n_most else rng.choice(scored_N, n_most, replace=False)] = True
    xs, labels, done = [], [], 0
    with progress.bar("reading states", text.n_tokens) as advance:
        for stream in text.text.streams.values():
            n_tokens = text.text.n_tokens_of(stream)
            for start in range(0, n_tokens - 1, text.batch_size * seq_len):
                stop = min(start + text.batch_size * seq_len, n_tokens - 1)
                n = stop - start
                mine = torch.from_numpy(kept_N[done : done + n]).to(device)
                inputs_BT, target_N = rows_between(stream, start, stop, seq_len, device)
                x_of, argmax_of, nats_of = [], [], []
                with autocast(device, run.dtype):
                    for out in model.readouts(inputs_BT, range(1, n_loops + 1)):
                        h_ND = out.state.h_BTD.flatten(0, 1)[:n][mine].float()
                        y_ND = out.y_BTD.flatten(0, 1)[:n][mine]
                        x_of.append(F.rms_norm(h_ND, h_ND.shape[-1:], eps=PROBE_EPS).cpu())
                        argmax_of.append(model.logits(y_ND).argmax(-1).cpu())
                        nats_of.append(torch.from_numpy(nats(model, y_ND, target_N[mine])))
                xs.append(torch.stack(x_of[:-1], 1))
                labels.append(labelled(torch.stack(argmax_of), torch.stack(nats_of), label, delta).T)
                done += n
                advance(n)
    return States(torch.cat(xs), torch.cat(labels))


def labelled(argmax_RN: Tensor, nats_RN: Tensor, label: str, delta: float) -> Tensor:
    """After each loop but the last, whether the argmax is another one in a later loop, or the loss of a later loop is
    lower by more than ``delta``: ``[R - 1, N]``."""
    if label == "argmax_changes":
        true = [(argmax_RN[i + 1 :] != argmax_RN[i]).any(0) for i in range(len(argmax_RN) - 1)]
    else:
        true = [nats_RN[i + 1 :].amin(0) < nats_RN[i] - delta for i in range(len(nats_RN) - 1)]
    return torch.stack(true)


def logistic(x_NRD: Tensor, true_NR: Tensor) -> tuple[Tensor, Tensor]:
    """``weight_D`` and ``bias_R`` of the logistic regression with a bias a loop, by L-BFGS."""
    y_NR = true_NR.to(x_NRD.dtype)
    share_R = y_NR.mean(0).clamp(1e-4, 1 - 1e-4)
    weight_D = torch.zeros(x_NRD.size(-1), dtype=x_NRD.dtype, requires_grad=True)
    bias_R = torch.logit(share_R).clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight_D, bias_R], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x_NRD @ weight_D + bias_R, y_NR) + DECAY * weight_D.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # pyrefly: ignore
    return weight_D.detach(), bias_R.detach()


def auc(score_N: np.ndarray, true_N: np.ndarray) -> float | None:
    """Area under the ROC curve: how often a true one scores above a false one, ties half; None where all are alike."""
    n_true = int(true_N.sum())
    if n_true in (0, len(true_N)):
        return None
    _, place_N, n_U = np.unique(score_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(n_U) - (n_U - 1) / 2)[place_N]
    return float((rank_N[true_N].sum() - n_true * (n_true + 1) / 2) / (n_true * (len(true_N) - n_true)))


def _result(
    found: dict[str, Any], n_loops: int, weight_D: Tensor, bias_R: Tensor, fit: States, held: States
) -> ProbeResult:
    p_NR = torch.sigmoid((held.x_NRD @ weight_D + bias_R).double()).numpy()
    true_NR, share_R = held.true_NR.numpy(), fit.true_NR.double().mean(0).clamp(1e-4, 1 - 1e-4).numpy()
    in_bin_NR = np.minimum((p_NR * N_BINS).astype(int), N_BINS - 1)
    bins = [
        Bin(int(here.sum()), float(p_NR[here].mean()), float(true_NR[here].mean()))
        for here in (in_bin_NR == i for i in range(N_BINS))
        if here.any()
    ]
    return ProbeResult(
        **found,
        n_loops=n_loops,
        n_fitted=fit.true_NR.numel(),
        n_held_out=held.true_NR.numel(),
        share=float(true_NR.mean()),
        accuracy=float(((p_NR > 0.5) == true_NR).mean()),
        auc=auc(p_NR.ravel(), true_NR.ravel()),
        loss=_log_loss(p_NR, true_NR),
        base_loss=_log_loss(np.broadcast_to(share_R, p_NR.shape), true_NR),
        calibration_error=sum(one.n * abs(one.probability - one.share) for one in bins) / true_NR.size,
        bins=tuple(bins),
        by_loop=tuple(
            LoopLabel(i + 1, float(true_NR[:, i].mean()), auc(p_NR[:, i], true_NR[:, i])) for i in range(n_loops - 1)
        ),
    )


def _log_loss(p_NR: np.ndarray, true_NR: np.ndarray) -> float:
    p_NR = np.clip(p_NR, 1e-12, 1 - 1e-12)
    return float(-np.where(true_NR, np.log(p_NR), np.log(1 - p_NR)).mean())

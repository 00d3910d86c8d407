"""The training loop: draw a depth, run the batch, step, log, validate, save.

Every process of a run goes through all of it, with a part of the rows of every batch (``parallel.py``); the main one
writes the run folder.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alcoda import launch, progress
from alcoda.data.batches import Batch
from alcoda.data.prepare import Data, prepare
from alcoda.depth.plan import LoopPlan
from alcoda.errors import RunError, UsageError
from alcoda.files import disk, remove_abandoned, write_text
from alcoda.model.blocks import Stack
from alcoda.model.lm import RecurrentLM
from alcoda.training import checkpoint
from alcoda.training.begin import check_vocabulary, first_record, notes, parallel_record
from alcoda.training.device import (
    autocast,
    keep_freed_memory,
    peak_memory_bytes,
    pick_device,
    pick_dtype,
    rng_state,
    set_rng_state,
)
from alcoda.training.load import check_tokenizer
from alcoda.training.mastery import climb
from alcoda.training.parallel import check_rows, full
from alcoda.training.passes import step_loss
from alcoda.training.processes import ALONE, Processes, joined
from alcoda.training.recipe import Recipe
from alcoda.training.run import RunFolder
from alcoda.training.start import keep_template, start
from alcoda.training.stop import stop_on_signal
from alcoda.training.track import Trackers, check_trackers
from alcoda.training.trainable import freeze
from alcoda.training.validate import validation
from alcoda.training.window import Window


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Attributes:
        run: its folder.
        status: ``finished``, or ``stopped`` by a signal (resume it).
        train_step: steps done.
        tokens: tokens trained on, repeats counted.
        loss: of the last step, nats a token.
        best_bits_per_byte: the lowest validation figure at the model's n_loops; None before the first validation.
        executed_flops: training FLOPs by the ledger's convention, at the depths that were drawn.
        wall_s: seconds spent in training, all sessions together.
    """

    run: Path
    status: str
    train_step: int
    tokens: int
    loss: float | None
    best_bits_per_byte: float | None
    executed_flops: float
    wall_s: float


def train(recipe: Recipe, out: str | Path, resume: bool = False) -> TrainResult:
    """Train ``recipe`` in the folder ``out``, from the start or from its newest checkpoint.

    SIGINT and SIGTERM save a checkpoint and return a result whose status is ``stopped``. In a process that torchrun
    started, it trains together with the others, and all return the same.

    Raises:
        UsageError: the recipe or the folder does not allow it.
        RunError: a damaged checkpoint, a full disk, a loss that is not finite, a lost peer.
    """
    if not isinstance(recipe, Recipe):
        raise UsageError(f"train takes a Recipe, not {recipe!r}: alcoda.load_recipe(PATH) reads one from a YAML file")
    recipe, run = recipe.resolved(), RunFolder(out)
    device = pick_device(recipe.train.device)
    keep_freed_memory()
    dtype = pick_dtype(recipe.train.dtype, device)
    check_trackers(recipe.track)
    world_size = launch.place().world_size
    check_rows(world_size, recipe.train.batch_size, recipe.train.micro_batches)
    if recipe.train.compile:
        recipe.parallel.check_compile(world_size)
    with (
        joined(device, recipe.parallel.timeout_s) as processes,
        processes.losing(lambda: checkpoint.last_good(run.checkpoints)),
    ):
        return _train(recipe, run, resume, device, dtype, processes)


def _train(
    recipe: Recipe, run: RunFolder, resume: bool, device: torch.device, dtype: torch.dtype, processes: Processes
) -> TrainResult:
    with ExitStack() as held:
        with processes.together():
            if processes.is_main:
                run.check_begin(recipe, resume)
                held.enter_context(run.locked())
                run.check_begin(recipe, resume)
        with processes.together():
            tokenizer = run.load_tokenizer() if run.tokenizer.exists() else None
            saved = checkpoint.listed(run.checkpoints)
            if saved and tokenizer is not None:
                check_tokenizer(run, saved[-1], tokenizer)
        data = processes.first(lambda: prepare(recipe.data, tokenizer))
        with processes.together():
            check_vocabulary(recipe, data.tokenizer)
            for note in notes(recipe, data):
                progress.say(note)
        trainer = Trainer(recipe, run, data, device, dtype, processes)
        if saved:
            trainer.restore(saved[-1])
        else:
            with processes.together():
                trainer.started = start(recipe, trainer.model, data.tokenizer, run)
        with processes.together():
            if processes.is_main:
                # All that can be refused has been: from here on the folder is a run.
                remove_abandoned(run.path)
                remove_abandoned(run.checkpoints)
                write_text(run.recipe_yaml, recipe.to_yaml())
                if tokenizer is None:
                    with disk(run.tokenizer):
                        data.tokenizer.save(run.tokenizer)
                    keep_template(recipe, run)
        return trainer.run_to_end()


class Trainer:
    """One run in progress, at its beginning; `restore` moves it to a checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        data: Data,
        device: torch.device,
        dtype: torch.dtype,
        processes: Processes = ALONE,
    ) -> None:
        self.recipe, self.run, self.data, self.device, self.dtype = recipe, run, data, device, dtype
        self.processes = processes
        self.model = checkpoint.build(recipe.model, device).init(recipe.train.seed)
        freeze(self.model, recipe.trainable)
        self.shared = recipe.parallel.share(self.model, processes, recipe.train.micro_batches, recipe.run_once)
        self.batches = data.batches(recipe.train.batch_size, recipe.model.seq_len, recipe.train.seed)
        self.optimizers = recipe.train.optimizer.build(self.model)
        self.peak_lrs = [[group["lr"] for group in o.param_groups] for o in self.optimizers]
        self.token_bytes_V = data.tokenizer.token_bytes_V
        self.n_steps = recipe.n_steps
        self.train_step = 0
        self.tokens = 0
        self.executed_flops = 0.0
        self.wall_s = 0.0
        self.loss: float | None = None
        self.best: dict[str, Any] | None = None
        self.batch_state: Any = None
        self.saved_step: int | None = None
        self.step_flops = recipe.step_flops
        self.started: dict[str, Any] = {}
        processes.seed(recipe.train.seed)

    def run_to_end(self) -> TrainResult:
        """Train until the recipe's last step or a signal."""
        with self.processes.together():
            self._record(**first_record(self))
        if self.recipe.train.compile:
            self._compile()
        try:
            with self.processes.together():
                trackers = Trackers(self.recipe, self.run, self.train_step, self.processes.is_main)
            with closing(trackers), stop_on_signal(self.processes.is_main) as stop:
                status = self._loop(trackers, stop)
        except BaseException as error:
            # What went wrong is for the user to see, not that it could not be noted down either.
            with suppress(RunError):
                status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                self._record(status=status, result=self._result_json())
            raise
        peaks = self.processes.gather(peak_memory_bytes(self.device))
        self._record(
            status=status, result=self._result_json(), parallel={**parallel_record(self), "peak_memory_bytes": peaks}
        )
        return TrainResult(
            self.run.path,
            status,
            self.train_step,
            self.tokens,
            self.loss,
            self.best["bits_per_byte"] if self.best else None,
            self.executed_flops,
            self.wall_s,
        )

    def _loop(self, trackers: Trackers, stop: threading.Event) -> str:
        config = self.recipe.train
        self.model.train()
        since = self._window()
        began = time.perf_counter() - self.wall_s
        with progress.bar("training", self.n_steps, self.train_step) as advance:
            while self.train_step < self.n_steps:
                if self.processes.any(stop.is_set()):
                    self._save()
                    return "stopped"
                batch, batch_state = next(self.batches)
                plan = self._plan(self.train_step)
                lr = self._set_lr()
                self.model.route.train_step = self.train_step
                loss, grad_norm = self._step(batch, plan)
                self.train_step += 1
                self.batch_state = batch_state
                self.tokens += batch.inputs_BT.size
                self.executed_flops += self.step_flops(plan, self.train_step - 1) * batch.inputs_BT.size
                self.loss, self.wall_s = loss, time.perf_counter() - began
                since.add(plan)
                last = self.train_step == self.n_steps
                note = f"loss {loss:.3f}  {since.tokens_per_s(self):,.0f} tokens/s  {since.mean_loops():.1f} loops"
                advance(1, note)
                if self.train_step % config.log_every == 0 or last or self.train_step == 1:
                    self._log(trackers, since.record(self, loss, grad_norm, lr, plan))
                    since = self._window()
                validates = self.train_step % self.recipe.eval.every == 0 or last
                saves = self.train_step % config.checkpoint_every == 0 or last
                better = validates and self._validate(trackers)
                if validates or saves:
                    self.wall_s = time.perf_counter() - began
                    if saves or better:
                        self._save()
                    since = self._window()  # validation is not training speed
        return "finished"

    def _plan(self, train_step: int) -> LoopPlan:
        config = self.recipe.train
        return self.recipe.depth.draw(config.seed, train_step, config.batch_size)

    def _window(self) -> Window:
        """What happened since the last logged step. Depths are known of every step, also of an earlier session."""
        every = self.recipe.train.log_every
        logged = max(self.train_step - self.train_step % every, min(self.train_step, 1))
        return Window(self.wall_s, self.tokens, map(self._plan, range(logged, self.train_step)))

    def _step(self, batch: Batch, plan: LoopPlan) -> tuple[float, float]:
        """One optimizer step; the loss in nats a token, and the norm of the gradients before clipping."""
        config = self.recipe.train
        inputs_BT = torch.from_numpy(batch.inputs_BT).to(self.device)
        targets_BT = torch.from_numpy(batch.targets_BT).to(self.device)
        scored_T = (batch.targets_BT >= 0).sum(0).tolist()
        total, n_ranks = 0.0, self.processes.world_size
        n_parts = n_ranks * config.micro_batches
        parts = list(zip(inputs_BT.chunk(n_parts), targets_BT.chunk(n_parts), strict=True))
        # Micro-batches of this process: every one draws the whole batch, and takes its rows.
        for i in range(self.processes.rank * config.micro_batches, (self.processes.rank + 1) * config.micro_batches):
            with self.shared.micro_batch(is_last=(i + 1) % config.micro_batches == 0):
                with autocast(self.device, self.dtype):
                    loss = self.shared.loss(self._loss, *parts[i], scored_T, plan.part(i, n_parts))
                (loss * n_ranks).backward()  # gradients are averaged over the processes, and this is to be their sum
            total += loss.item()
        self.shared.complete()
        (total,) = self.processes.sum([total])
        self._check_finite("loss", total, batch, plan)
        norm = full(nn.utils.clip_grad_norm_(self.model.parameters(), config.clip or math.inf)).item()
        self._check_finite("gradient norm", norm, batch, plan)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _loss(
        self, model: RecurrentLM, inputs_BT: Tensor, targets_BT: Tensor, scored_T: list[int], plan: LoopPlan
    ) -> Tensor:
        recipe = self.recipe
        return step_loss(
            recipe.objective, recipe.passes, model, inputs_BT, targets_BT, scored_T, plan, recipe.train.recompute
        )

    def _check_finite(self, what: str, value: float, batch: Batch, plan: LoopPlan) -> None:
        """RunError where ``value``, which is the same on all processes, is not."""
        if math.isfinite(value):
            return
        where = "; ".join(batch.where[:4]) + (f"; and {len(batch.where) - 4} more rows" if len(batch.where) > 4 else "")
        with self.processes.together():  # said once
            raise RunError(
                f"the {what} is {value} at train step {self.train_step + 1} ({plan.n_loops} loops), batch: {where}. "
                f"Nothing was saved of that step. {checkpoint.last_good(self.run.checkpoints)}. Lower the learning "
                "rate (train.optimizer.lr), clip harder (train.clip), or train in float32 (train.dtype)"
            )

    def _set_lr(self) -> float:
        factor = self.recipe.train.schedule.factor(self.train_step, self.n_steps)
        for optimizer, peaks in zip(self.optimizers, self.peak_lrs, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self.peak_lrs[0][0] * factor

    def _validate(self, trackers: Trackers) -> bool:
        """Score the beginning of the validation text; whether the model is the best so far at n_loops."""
        records, bits = validation(self)
        self._log(trackers, *records, *climb(self))
        if not math.isfinite(bits):
            if self.train_step == self.n_steps:
                with self.processes.together():  # said once
                    raise RunError(
                        f"the model diverged: its validation loss is not finite after the last step, "
                        f"{self.train_step}. {checkpoint.last_good(self.run.checkpoints)}. Lower the learning rate "
                        "(train.optimizer.lr) or clip harder (train.clip)"
                    )
        elif self.best is None or bits < self.best["bits_per_byte"]:
            self.best = {"train_step": self.train_step, "bits_per_byte": bits}
            return True
        return False

    def _log(self, trackers: Trackers, *records: dict[str, Any]) -> None:
        with self.processes.together():  # a full disk is the main one's to find, and ends all
            for record in records:
                trackers.log(record)

    def _save(self) -> None:
        if self.saved_step == self.train_step:
            # Only what the manifest says may have changed since (the best step); the weights have not.
            return
        rng, *others = self.processes.gather(rng_state(self.device))
        state = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            **rng,
            "other_ranks": others,
            "batches": self.batch_state,
            "train_step": self.train_step,
            "tokens": self.tokens,
            "executed_flops": self.executed_flops,
            "wall_s": self.wall_s,
            "loss": self.loss,
            "best": self.best,
        }
        about = {"tokens": self.tokens, "tokenizer_sha256": self.data.tokenizer.sha256, "best": self.best}
        checkpoint.save(self.run.checkpoints, self.train_step, self.model, state, about, self.processes)
        self.saved_step = self.train_step
        best = self.best["train_step"] if self.best else None
        with self.processes.together(), disk(self.run.checkpoints):
            if self.processes.is_main:
                checkpoint.prune(self.run.checkpoints, self.recipe.train.keep_checkpoints, best)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        with self.processes.together():
            self.run.check_corpora(self.data)
        checkpoint.load_weights(path, self.model, self.processes)
        state = checkpoint.load_train_state(path, self.optimizers, self.processes)
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(optimizer_state)
        by_rank = [state, *state.get("other_ranks", [])]
        if len(by_rank) == self.processes.world_size:
            set_rng_state(by_rank[self.processes.rank], self.device)
        elif state["train_step"] < self.n_steps:  # else nothing more is drawn
            progress.say(
                f"{path.name} is of {len(by_rank)} processes and {self.processes.world_size} go on from it: the noise "
                "from here on is drawn anew"
            )
            self.processes.seed(self.recipe.train.seed, state["train_step"])
        self.best = state["best"]
        self.batch_state = state["batches"]
        if self.batch_state is not None:
            rows, seq_len = self.recipe.train.batch_size, self.recipe.model.seq_len
            self.batches = self.data.batches(rows, seq_len, self.recipe.train.seed, self.batch_state)
        self.train_step, self.tokens, self.loss = state["train_step"], state["tokens"], state["loss"]
        self.executed_flops, self.wall_s = state["executed_flops"], state["wall_s"]
        self.saved_step = self.train_step

    def _compile(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Stack):
                module.compile()

    def _record(self, **fields: Any) -> None:
        if self.processes.is_main:
            self.run.update_record(**fields)

    def _result_json(self) -> dict[str, Any]:
        return {
            "train_step": self.train_step,
            "tokens": self.tokens,
            "loss": self.loss,
            "best": self.best,
            "executed_flops": self.executed_flops,
            "wall_s": self.wall_s,
        }

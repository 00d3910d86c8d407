"""The recipe: everything that a run is made from, in one YAML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from alcoda.config import Bool, Config, NonNegativeInt, PositiveFloat, PositiveInt, validate
from alcoda.data.config import DataConfig
from alcoda.depth.sample import Depth, Fixed
from alcoda.errors import UsageError, did_you_mean
from alcoda.model.config import ModelConfig
from alcoda.model.cost import Ledger, ledger
from alcoda.model.prefill import InterleavedPrefill, Prefill
from alcoda.plugins import load_entry_points
from alcoda.training.budget import Budget, StepFlops
from alcoda.training.folders import find_recipe, is_overlay
from alcoda.training.objective import NextToken, Objective
from alcoda.training.optim import AdamW, OptimizerConfig, Schedule
from alcoda.training.overlay import Overlay, overlay_all
from alcoda.training.parallel import Ddp, Parallel
from alcoda.training.passes import AutoPasses, Passes
from alcoda.training.trainable import InitFrom, check_trainable

DEFAULT_STEPS = 1000


class TrainConfig(Config):
    """How the weights are trained. One train step sees batch_size x seq_len tokens, in micro_batches parts."""

    steps: PositiveInt | None = None
    """Optimizer steps; 1000 where neither steps nor a budget is set."""
    budget: Budget | None = None
    """In place of steps: {flops: X}, {tokens: X} or {tokens_per_param: X} (of stored parameters); equal spend."""
    batch_size: PositiveInt = 8
    """Rows of seq_len tokens in one optimizer step, of all processes together."""
    micro_batches: PositiveInt = 1
    """Gradient accumulation: the batch, or each process's share of it, is run in so many parts. Must divide it."""
    seed: Annotated[NonNegativeInt, Field(lt=1 << 63)] = 0
    """Of the initial weights, the noise, the depths and the order of the batches (data.seed: of the splits)."""
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Schedule()
    clip: PositiveFloat | None = 1.0
    """The norm that gradients are clipped to; null: not at all."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """bfloat16 means autocast. auto: where the hardware multiplies in it (GPU, or CPU with AMX or AVX512-BF16)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compile: Bool = False
    """torch.compile of prelude, core and coda (the pass, not the loop). Needs a C++ compiler on a CPU."""
    recompute: Bool = False
    """Activation checkpointing: keep one state a loop, run the loop again in the backward pass."""
    checkpoint_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints stay; the best one stays too."""
    log_every: PositiveInt = 10

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.batch_size % self.micro_batches:
            fits = [n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]
            raise ValueError(
                f"micro_batches={self.micro_batches} must divide batch_size={self.batch_size}: one of {fits}"
            )
        return self


class EvalConfig(Config):
    """Validation during training."""

    every: PositiveInt = 250
    tokens: Annotated[PositiveInt, Field(ge=2)] = 20_000
    """At most so many tokens of each validation source."""
    loops: tuple[PositiveInt, ...] = ()
    """Depths to score; n_loops is always among them, and decides which checkpoint is the best."""
    batch_size: PositiveInt = 8
    prefill: Prefill = InterleavedPrefill()
    """How validation reads rows, where the model has a memory (alcoda eval reads them exactly)."""


class TrackConfig(Config):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: Bool = False
    wandb: Literal["off", "online", "offline"] = "off"
    project: str = "alcoda"


class Recipe(Config):
    """One run: a model, the depths that it trains at, data, and how it is trained."""

    name: str = "run"
    description: str = ""
    source: str = ""
    """Where the design is published: paper and section."""
    model: ModelConfig = ModelConfig()
    depth: Depth = Fixed()
    objective: Objective = NextToken()
    passes: Passes = AutoPasses()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    parallel: Parallel = Ddp()
    """What each of many processes (torchrun) holds of the model; with one it says nothing."""
    eval: EvalConfig = EvalConfig()
    track: TrackConfig = TrackConfig()
    init_from: InitFrom | None = None
    """A run whose weights this one starts from (a path, or ``{run: PATH, checkpoint: best}``); null: fresh weights."""
    trainable: tuple[str, ...] | None = None
    """The parts of the model that learn, by axis (update, inject, core, embed, ...; memory: in the blocks too); null:
    all. The rest is frozen. The ledger counts as if all learnt: what the step saves by it is not in its figures."""

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"\w[\w .+-]*", name):
            raise ValueError("a name is letters, digits, spaces and . _ + -, and begins with a letter or digit")
        return name

    @model_validator(mode="after")
    def _dense_has_one_depth(self) -> Self:
        if not self.model.is_recurrent and self.depth.resolve(1, 1).max_loops > 1:
            raise ValueError(
                f"depth {self.depth.kind!r} with n_core=0: a dense model has one depth; set depth to fixed"
            )
        return self

    @model_validator(mode="after")
    def _prelude_gets_gradients(self) -> Self:
        if self.depth.last_k and not self.model.anchor_reaches_loop:
            raise ValueError(
                f"depth.last_k={self.depth.last_k} with inject {self.model.inject.kind!r} and update "
                f"{self.model.update.kind!r}: where earlier loops run without gradients, none reach the prelude. Set "
                "inject to add or concat, keys to anchor, or last_k to null"
            )
        return self

    @model_validator(mode="after")
    def _every_loop_learns(self) -> Self:
        if self.depth.last_k and self.model.has_weights_by_loop:
            raise ValueError(
                f"depth.last_k={self.depth.last_k} with sharing {self.model.sharing.kind!r} and route "
                f"{self.model.route.kind!r}: what early loops have of their own would not learn. Set last_k to null, "
                "or sharing to tied and route to none or token_choice"
            )
        return self

    @model_validator(mode="after")
    def _rows_share_loops(self) -> Self:
        if self.depth.per_row and (self.objective.reads_inner_loops or self.model.max_loops is not None):
            model = self.model
            what = (
                f"objective {self.objective.kind!r}, which compares loops of one pass"
                if self.objective.reads_inner_loops
                else f"sharing {model.sharing.kind!r} and route {model.route.kind!r}, which have weights for each loop"
            )
            raise ValueError(f"depth.per 'sequence' with {what}: rows are at different loops. Set depth.per to batch")
        return self

    @model_validator(mode="after")
    def _memory_learns(self) -> Self:
        memory, passes = self.model.memory, self.passes.resolve(self.model.memory.carries)
        if memory.carries and not passes.fills_memory:
            raise ValueError(
                f"model.memory {memory.kind!r} learns nothing from passes {passes.kind!r}, in which every memory is "
                "zero: set passes to interleaved, refined, chunked or sequential, or model.memory to none"
            )
        if passes.fills_memory and not memory.carries:
            raise ValueError(
                f"passes {passes.kind!r} with model.memory {memory.kind!r}: there is no memory to fill; set passes to "
                "one, or model.memory to prev_token"
            )
        passes.check(self.model.seq_len)
        if memory.carries and self.train.compile:
            raise ValueError(
                f"train.compile with passes {passes.kind!r}: their keys are not those of one pass, which is what is "
                "compiled; set train.compile to false"
            )
        return self

    @model_validator(mode="after")
    def _exit_gate_learns(self) -> Self:
        has_gate, wants_gate = self.model.exit_gate.has_gate, self.objective.needs_exit_gate
        if wants_gate and not has_gate:
            raise ValueError(
                f"objective {self.objective.kind!r} weighs the loops by an exit gate and the model has none: set "
                "model.exit_gate to linear, or objective to next_token or self_distill"
            )
        if has_gate and not wants_gate:
            raise ValueError(
                f"model.exit_gate {self.model.exit_gate.kind!r} learns nothing from objective {self.objective.kind!r}: "
                "set objective to per_loop, or model.exit_gate to none"
            )
        return self

    @model_validator(mode="after")
    def _something_learns(self) -> Self:
        if self.trainable is not None:
            check_trainable(self.model, self.trainable)
        return self

    def resolved(self) -> Recipe:
        """The recipe with its number of train steps, and the depths that were left to the model's n_loops, filled in.

        Raises:
            UsageError: the budget and the number of steps disagree, or a depth does not fit the model.
        """
        n_steps = self.n_steps
        depth = self.depth.resolve(self.model.n_loops, n_steps)
        self.model.check_loops(depth.max_loops, "depth: its deepest step")
        for n_loops in self.eval.loops:
            self.model.check_loops(n_loops, "eval.loops")
        loops = tuple(sorted({*self.eval.loops, self.model.n_loops}))
        passes = self.passes.resolve(self.model.memory.carries)
        prefill = self.eval.prefill.resolve(passes.prefill_subsets())
        return self.model_copy(
            update={
                "depth": depth,
                "passes": passes,
                "train": self.train.model_copy(update={"steps": n_steps}),
                "eval": self.eval.model_copy(update={"loops": loops, "prefill": prefill}),
            }
        )

    @property
    def n_steps(self) -> int:
        """Train steps of the run: ``train.steps``, or what ``train.budget`` pays for."""
        train = self.train
        if train.budget is None:
            return DEFAULT_STEPS if train.steps is None else train.steps
        paid = train.budget.n_steps(self.step_flops, self.depth, train.batch_size, train.seed)
        if train.steps not in (None, paid):
            raise UsageError(
                f"train.steps={train.steps} and train.budget ({train.budget}, which is {paid} steps) disagree: set one "
                "of them to null (--set train.steps=null)"
            )
        return paid

    @property
    def run_once(self) -> tuple[str, ...]:
        """The stacks that run once for each micro-batch: not those of several passes, nor a coda of several depths."""
        if self.model.memory.carries:
            return ()
        return ("prelude",) if self.objective.reads_inner_loops else ("prelude", "coda")

    @property
    def step_tokens(self) -> int:
        """Tokens of one train step."""
        return self.train.batch_size * self.model.seq_len

    def ledger(self, loops: int | None = None) -> Ledger:
        """The cost of the model at ``loops`` loops, trained at this recipe's depths."""
        depth = self.depth.resolve(self.model.n_loops, self.n_steps)
        return ledger(self.model, loops, self.step_flops.mixture(depth))

    @property
    def step_flops(self) -> StepFlops:
        """What a train step of given depths costs."""
        passes = self.passes.resolve(self.model.memory.carries)
        return StepFlops(self.model, self.objective, self.train.recompute, passes)

    def to_yaml(self) -> str:
        """As the run folder keeps it; `load_recipe` reads it back unchanged."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML would silently keep the last one, with the numbers of YAML 1.2.

    In 1.1, which PyYAML reads, ``0100`` is 64, ``1:40`` is 100 and ``1e-3`` a word.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own way)
        first: [(tag, pattern) for tag, pattern in found if not tag.endswith((":int", ":float"))]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_DIGITS = list("-+0123456789.")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9_]*)$"), _DIGITS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
    ),
    _DIGITS,
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a name is needed before the colon", problem_mark=key_node.start_mark)
        if key_node.value in seen:
            problem = f"the key {key_node.value!r} is given twice"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        seen.add(key_node.value)
    loader.flatten_mapping(node)  # keys that come with << may be given again: the nearer one holds
    return {
        loader.construct_object(key, deep=True): loader.construct_object(value, deep=True) for key, value in node.value
    }


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, what: str) -> Any:
    """YAML as data; a syntax error names the place."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{what} is not valid YAML:{where} {problem}") from None
    except (ValueError, AttributeError, RecursionError) as error:  # dates that are none, numbers of 5,000 digits
        raise UsageError(f"{what} is not valid YAML: {error}") from None


def load_recipe(path: str | Path, settings: Sequence[str] = (), overlays: Sequence[str | Path] = ()) -> Recipe:
    """The recipe in a YAML file, with ``overlays`` (alcoda/training/overlay.py) and then ``settings`` put over it.

    Args:
        path: a file, or the name of one of the project's recipes: ``mini/grt``.
        settings: ``"a.b=c"``, c read as YAML.
        overlays: YAML files with a part of a recipe, put over it in order.

    Raises:
        UsageError: no such file, not YAML, or an entry that the recipe does not take.
    """
    load_entry_points()
    path = find_recipe(path)
    if is_overlay(path, path.parent):
        raise UsageError(f"{path} is an overlay, a part of a recipe: put it over a whole one (RECIPE --with {path})")
    data = read_mapping(path)
    data.setdefault("name", path.stem)
    recipe = validate(Recipe, data, str(path))
    if not settings and not overlays:
        return recipe

    def complete(data: dict[str, Any]) -> dict[str, Any]:
        return validate(Recipe, data, str(path)).model_dump(mode="json")

    # Over the full dump, so that a setting below a default (`model.inject.noise`) has something to stand in.
    data = overlay_all(recipe.model_dump(mode="json"), [_overlay(find_recipe(one)) for one in overlays], complete)
    for setting in settings:
        apply_setting(data, setting)
    return validate(Recipe, data, "the recipe after --set")


def named(name: str, settings: Sequence[str] = (), overlays: Sequence[str | Path] = ()) -> str:
    """A recipe's name with what was put over it (`load_recipe`), for a report: as a command line has it."""
    return " ".join([name, *(f"--with {one}" for one in overlays), *(f"--set {one}" for one in settings)])


def _overlay(path: Path) -> Overlay:
    return path.stem, read_mapping(path)


def read_mapping(path: Path) -> dict[str, Any]:
    """What the YAML file of a recipe, or of a part of one, holds; UsageError where that is no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder: give a recipe's YAML file (of a run: {path / 'recipe.yaml'})") from None
    except OSError as error:
        raise UsageError(f"cannot read the recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not a text file: a recipe is a YAML file") from None
    data = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no recipe: a mapping with {', '.join(Recipe.model_fields)} was expected")
    return data


def apply_setting(data: dict[str, Any], setting: str) -> None:
    """Put one ``a.b=c`` into nested mappings, in place."""
    name, equals, text = setting.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"--set {setting}: write it as name.name=value, for example train.steps=500")
    here: Any = data
    for depth, key in enumerate(keys[:-1]):
        if isinstance(here.get(key), str):  # the short form of a choice: `gate` is {kind: gate}
            here[key] = {"kind": here[key]}
        if key in here and here[key] is None:  # what is not set may be set by its parts: train.budget.flops=1e15
            here[key] = {}
        inner = here.get(key)
        if not isinstance(inner, dict):
            path = ".".join(keys[: depth + 1])
            allowed = [k for k, v in here.items() if isinstance(v, dict)]
            hint = did_you_mean(key, allowed) if allowed else "."
            raise UsageError(f"--set {setting}: {path} has nothing below it{hint}")
        here = inner
    value = parse_yaml(text, f"the value of --set {name}")
    if keys[-1] == "kind":
        here.clear()  # the fields of the kind before do not fit the new one
    here[keys[-1]] = value

"""The run folder: what a run leaves behind, and who may write to it.

recipe.yaml        the resolved config
run.json           versions, commit, seeds, machine, data, ledger, state of the run
metrics.jsonl      a line a logged step, a line a validation
tokenizer.json
chat_template.jinja  (of an imported model, and what was made of it)
checkpoints/step_00000500/{model.safetensors, train_state.pt, checkpoint.json}
eval.json, samples.json, report.html        (by alcoda report)
caches.json        (by alcoda eval --cache all)
prefills.json      (by alcoda eval --prefill all)
probe.safetensors  (by alcoda probe)
exits.json         (by alcoda calibrate)
frontier.json      (by alcoda frontier)
harness.json       (by alcoda harness)
lab/               (by alcoda lab)
heal.yaml, retrofit.json  (by alcoda retrofit; the losses after healing by alcoda healed)
texts/valid/*.jsonl  (by alcoda pack --keep: splits that went along)

Of an imported run the weights alone are there, and tokenizer.json where the checkpoint had one.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from alcoda.data.chat_template import TEMPLATE
from alcoda.data.prepare import Data
from alcoda.data.tokenizer import Tokenizer
from alcoda.depth.tiers import EXITS, PROBE
from alcoda.errors import RunError, UsageError
from alcoda.files import disk, read_json, whole_folder, write_json
from alcoda.training.recipe import Recipe, load_recipe

MAY_CHANGE = (
    "data.corpus",
    "data.tokenizer.path",
    "data.valid",
    "description",
    "eval.batch_size",
    "parallel",
    "source",
    "track",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
)
"""Entries that do not change the weights of a run, so that a resumed run may set them anew (of data: where it lies; the
text itself is compared)."""


RUN_FILES = (
    "caches.json",
    "chat_template.jinja",
    "checkpoints",
    "eval.json",
    "exits.json",
    "frontier.json",
    "harness.json",
    "heal.yaml",
    "lab",
    "metrics.jsonl",
    "prefills.json",
    "probe.safetensors",
    "recipe.yaml",
    "report.html",
    "retrofit.json",
    "run.json",
    "samples.json",
    "tensorboard",
    "texts",
    "tokenizer.json",
    "wandb",
)
"""All that alcoda writes into a run folder."""


SHIPPED = Path(__file__).parents[1] / "shipped"
"""Packed runs that come with the package, a folder each."""


def shipped() -> list[str]:
    """Their names."""
    return sorted(path.name for path in SHIPPED.iterdir() if RunFolder(path).exists) if SHIPPED.is_dir() else []


class RunFolder:
    """Paths and records of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_yaml = self.path / "recipe.yaml"
        self.run_json = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tokenizer = self.path / "tokenizer.json"
        self.chat_template = self.path / TEMPLATE
        self.checkpoints = self.path / "checkpoints"
        self.eval_json = self.path / "eval.json"
        self.samples_json = self.path / "samples.json"
        self.caches_json = self.path / "caches.json"
        self.prefills_json = self.path / "prefills.json"
        self.probe = self.path / PROBE
        self.exits_json = self.path / EXITS
        self.frontier_json = self.path / "frontier.json"
        self.harness_json = self.path / "harness.json"
        self.lab = self.path / "lab"
        self.texts = self.path / "texts"
        self.report = self.path / "report.html"

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe_yaml.exists()

    @classmethod
    def find(cls, path: str | Path) -> RunFolder:
        """The run in the folder ``path``, or the one of that name that comes with the package; UsageError otherwise."""
        if not Path(path).exists() and str(path) in shipped():
            return cls(SHIPPED / str(path)).check()
        return cls(path).check()

    def writable(self) -> RunFolder:
        """Where measurements of the run go: itself; of one that comes with the package, its copy ``runs/NAME`` here,
        made where there is none. UsageError where another run lies there."""
        if not self.exists:
            raise UsageError(
                f"{self.path} is no run, and nothing is written into it: alcoda import {self.path} --out RUN makes one "
                "of it, whose measurements are kept"
            )
        if self.path.parent != SHIPPED:
            return self
        own = RunFolder(Path("runs") / self.path.name)
        if not own.path.exists():
            with disk(own.path):
                own.path.parent.mkdir(exist_ok=True)
            with whole_folder(own.path) as folder:
                shutil.copytree(self.path, folder, dirs_exist_ok=True)
        elif not own.run_json.exists() or own.record().get("packed") != self.record()["packed"]:
            raise UsageError(
                f"{own.path} is where measurements of the model {self.path.name} go, which comes with alcoda, and it "
                "holds something else: move it away, or work in another folder"
            )
        return own

    def check(self) -> RunFolder:
        """The folder, if a run is in it; UsageError otherwise."""
        if not self.path.exists():
            names = f", or the name of a model that comes with alcoda ({', '.join(shipped())})" if shipped() else ""
            raise UsageError(f"there is no run at {self.path}: give the folder that alcoda train wrote (--out){names}")
        if not self.exists:
            raise UsageError(
                f"{self.path} is not a run: it has no recipe.yaml. Give the folder that alcoda train wrote (--out), or "
                "make a run of another project's checkpoint: alcoda import"
            )
        return self

    def recipe(self) -> Recipe:
        """The resolved recipe that the run was begun with."""
        return load_recipe(self.check().recipe_yaml)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that the run was begun with."""
        return self.recipe().data.tokenizer.saved(self.tokenizer)

    def check_begin(self, recipe: Recipe, resume: bool) -> None:
        """Refuse a new run where one is, a resumed one where none is, and a resumed one with another config."""
        file = next((p for p in (self.path, *self.path.parents) if p.exists() and not p.is_dir()), None)
        if file is not None:
            raise UsageError(f"--out {self.path}: {file} is a file, and a run is a folder; give another --out")
        if not self.exists:
            if resume:
                raise UsageError(f"there is no run at {self.path} to resume: leave --resume out to begin one")
            if self.path.exists() and any(not p.name.startswith(".") for p in self.path.iterdir()):
                raise UsageError(f"{self.path} is not empty and holds no run: give another --out (nothing was written)")
            return
        if not resume:
            raise UsageError(f"{self.path} holds a run already: add --resume to go on with it, or give another --out")
        before, now = (flatten(r.model_dump(mode="json")) for r in (self.recipe(), recipe))
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key) and not _may_change(key)]
        if changed:
            lines = "".join(f"\n  {key}: {before.get(key)!r} in the run, {now.get(key)!r} now" for key in changed)
            raise UsageError(
                f"{self.path} was begun with another config:{lines}\nResume with the same config, or begin a new run "
                f"with another --out (only these may change: {', '.join(MAY_CHANGE)})"
            )

    def kept(self, split: str) -> dict[str, str]:
        """Corpora with the text of a split of a packed run, by the sources' names; empty where none went along."""
        return {path.stem: f"jsonl:{path}" for path in sorted((self.texts / split).glob("*.jsonl"))}

    def check_corpora(self, data: Data) -> None:
        """Refuse text other than that which the run was begun with: its splits would not be the run's."""
        before = (read_json(self.run_json) if self.run_json.exists() else {}).get("data", {}).get("sources", [])
        for old, source in zip(before, data.describe()["sources"], strict=False):
            if old.get("content_hash") != source["content_hash"]:
                raise UsageError(
                    f"the corpus {source['corpus']} has changed since {self.path} was begun, and its splits are no "
                    "longer those of the run: put the old text back, begin a new run with another --out, or evaluate "
                    "on the whole of a corpus (--data)"
                )

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the folder against other processes; the lock goes with the process, however it ends."""
        is_new = not self.path.exists()
        with disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "unknown"
                raise UsageError(
                    f"{self.path} is in use by another alcoda (process {holder}): wait for it, or give another --out"
                ) from None
            try:
                with disk(self.path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                yield
            finally:
                # Refused before anything was begun: leave no trace.
                if self.path.exists() and [p.name for p in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    if is_new:
                        self.path.rmdir()
        finally:
            os.close(descriptor)

    def update_record(self, **fields: Any) -> None:
        """Change some fields of run.json."""
        record = read_json(self.run_json) if self.run_json.exists() else {}
        write_json(self.run_json, {**record, **fields})

    def record(self) -> dict[str, Any]:
        """run.json."""
        if not self.run_json.exists():
            raise RunError(f"{self.run_json} is missing: the run ended before it began to train; resume or repeat it")
        return read_json(self.run_json)


def flatten(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as ``{"a.b": value}``."""
    if not isinstance(data, dict):
        return {prefix: data}
    return {
        k: v for key, inner in data.items() for k, v in flatten(inner, f"{prefix}.{key}" if prefix else key).items()
    }


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(name + ".") for name in MAY_CHANGE)


def provenance() -> dict[str, Any]:
    """Versions, commit and command, for the record of a run."""
    packages = ("alcoda", "torch", "numpy", "pydantic", "tokenizers", "safetensors")
    commit, dirty = _commit()
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "commit": commit,
        "dirty": dirty,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of alcoda's own source, where it is a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed package may lie inside somebody else's repository: then its commit is not ours to name.
    if git("ls-files", "--error-unmatch", __file__) is None:
        return None, None
    status = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)

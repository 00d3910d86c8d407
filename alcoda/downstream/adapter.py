"""What lm-eval calls: `lm_eval.api.model.LM` over a loaded run, its answers at every depth from one pass.

Imports lm-eval: only when a task of it is run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alcoda.downstream.encode import Encoder
from alcoda.downstream.score import Answer, Scorer
from alcoda.downstream.tasks import SOURCES, read_task
from alcoda.engine.generated import Generated
from alcoda.engine.llm import LM
from alcoda.errors import UsageError, install
from alcoda.model.prefill import Tell

try:
    import datasets
    import evaluate as evaluate_package
    import huggingface_hub.constants
    import lm_eval
    import lm_eval.api.task
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM as Base
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml
except ImportError as error:
    raise UsageError(
        f"tasks of lm-eval need it, version 0.4.13 or newer ({error}); install it with: {install('harness')} "
        "(CORE needs none: --tasks core)"
    ) from None

VERSION = lm_eval.__version__
MOST_STOPS = 4
"""Stop strings that the engine looks for; texts are cut at the others when they are done."""
MAX_TOKENS = 256
"""Of a generated text where a task names none, as lm-eval's ``hf``."""

SHOTS_SEED = 1234
"""By which lm-eval draws shots where it is told none."""

Bar = Callable[[str, int], AbstractContextManager[Tell]]


class Answers:
    """What a model answers to lm-eval's requests, at every point; each request is worked out once.

    Args:
        bar: makes the progress bar of so many requests.
    """

    def __init__(self, lm: LM, scorer: Scorer, encoder: Encoder, bar: Bar) -> None:
        self.lm, self.scorer, self.encoder, self.bar = lm, scorer, encoder, bar
        self.known: dict[Any, Answer] = {}
        self.texts: dict[Any, str] = {}

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[Answer]:
        """To contexts with continuations."""
        new = [pair for pair in dict.fromkeys(texts) if pair not in self.known]
        if new:
            asks = self.encoder.pairs(new)
            with self.bar("scoring", len(asks)) as tell:
                self.known |= zip(new, self.scorer.score(asks, tell), strict=True)
        return [self.known[pair] for pair in texts]

    def rolling(self, texts: Sequence[str]) -> list[Answer]:
        """To whole texts."""
        new = [text for text in dict.fromkeys(texts) if text not in self.known]
        if new:
            asks = self.encoder.texts(new)
            with self.bar("scoring", len(asks)) as tell:
                self.known |= zip(new, self.scorer.score(asks, tell), strict=True)
        return [self.known[text] for text in texts]

    def generated(self, p: int, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        """What follows each context at point ``p``: all whose other arguments are alike in one call of the engine."""
        groups: dict[str, list[str]] = {}
        arguments: dict[str, dict[str, Any]] = {}
        keys = [(p, context, repr(sorted(how.items()))) for context, how in requests]
        for (_, context, kind), (_, how) in zip(keys, requests, strict=True):
            if (p, context, kind) not in self.texts:
                groups.setdefault(kind, []).append(context)
                arguments[kind] = how
        for kind, contexts in groups.items():
            contexts = list(dict.fromkeys(contexts))
            for context, text in zip(contexts, self._generate(p, contexts, arguments[kind]), strict=True):
                self.texts[p, context, kind] = text
        return [self.texts[key] for key in keys]

    def _generate(self, p: int, contexts: Sequence[str], how: dict[str, Any]) -> list[str]:
        until = how.get("until") or []
        until = [until] if isinstance(until, str) else [text for text in until if text]
        point, seq_len = self.scorer.points[p], self.lm.recipe.model.seq_len
        max_tokens = int(how.get("max_gen_toks", MAX_TOKENS))
        temperature = float(how.get("temperature") or 0.0) if how.get("do_sample") else 0.0
        prompts = [self._cut(context, max(1, seq_len - max_tokens - 1)) for context in contexts]
        made: list[Generated] = self.lm.generate(
            prompts,
            details=True,
            loops=point.loops,
            exit=None if point.exit is None else point.exit.test,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=float(how.get("top_p") or 1.0),
            stop=until[:MOST_STOPS] or None,
        )
        for one in made:
            if one.error is not None:
                raise UsageError(f"a text could not be generated: {one.error}")
            ran = [*one.prompt_loops, *(token.loops for token in one.tokens[1:])]
            self.scorer.spent.add(p, np.array(ran or [point.loops]))
        return [_ended(one.text, until) for one in made]

    def _cut(self, text: str, n_tokens: int) -> str:
        """The end of a context that is too long."""
        ids = self.lm.tokenizer.encode(text)
        return text if len(ids) <= n_tokens else self.lm.tokenizer.decode(ids[-n_tokens:])


def _ended(text: str, until: Sequence[str]) -> str:
    for stop in until:
        text = text.split(stop)[0]
    return text


class HarnessLM(Base):
    """One point of `Answers`, as lm-eval wants a model to be."""

    def __init__(self, answers: Answers, p: int) -> None:
        super().__init__()
        self.answers, self.p = answers, p

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        found = self.answers.pairs([request.args for request in requests])
        return [(-answer.nats_P[self.p], answer.greedy_P[self.p]) for answer in found]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        found = self.answers.rolling([request.args[0] for request in requests])
        return [-answer.nats_P[self.p] for answer in found]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return self.answers.generated(self.p, [request.args for request in requests])


class _Local(ConfigurableTask):
    """A task whose data are given."""

    def __init__(self, rows: dict[str, Any], config: dict[str, Any]) -> None:
        self._rows = rows
        super().__init__(config=config)

    def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.dataset = self._rows


@contextmanager
def offline() -> Generator[None]:
    """In the block nothing is fetched from a hub, nor looked for there."""
    flags = (
        (huggingface_hub.constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (evaluate_package.config, "HF_EVALUATE_OFFLINE"),
    )
    before = [getattr(place, name) for place, name in flags]
    try:
        for place, name in flags:
            setattr(place, name, True)
        yield
    finally:
        for (place, name), value in zip(flags, before, strict=True):
            setattr(place, name, value)


@offline()
def load_task(name: str, folder: Path, shots: int | None = None) -> ConfigurableTask:
    """A task by its name, lm-eval's definition with the data in ``folder``; or of a YAML file of the user's.

    Args:
        shots: before each document, drawn by lm-eval's sampler with its default seed; None: 0, or what the file says.

    Raises:
        UsageError: no data, or a file that is no task.
    """
    quiet()
    if name not in SOURCES:
        try:
            (task,) = TaskManager(include_defaults=False).load([name])["tasks"].values()
        except Exception as error:  # the file is the user's, and may fail in any way
            raise UsageError(f"--tasks {name}: it is no task of lm-eval ({type(error).__name__}: {error})") from error
        if shots is not None:
            task.set_config("num_fewshot", shots)
        task.set_fewshot_seed(SHOTS_SEED)
        return task
    source = SOURCES[name]
    rows = {source.split: datasets.Dataset.from_list(read_task(name, folder))}
    split = source.split
    if shots and source.shots is not None:
        split = source.shots[0]
        rows[split] = datasets.Dataset.from_list(read_task(name, folder, shots=True))
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / source.definition, resolve_func=True)
    for key in ("tag", "group", "training_split", "validation_split", "test_split"):
        config.pop(key, None)
    # By the name of test_split lm-eval knows that shots are of what is scored, and leaves the document out.
    config |= {"test_split": source.split, "fewshot_split": split, "num_fewshot": shots or 0}
    task = _Local(rows, config)
    task.set_fewshot_seed(SHOTS_SEED)
    return task


class Measured(NamedTuple):
    """One metric at one point.

    Attributes:
        value: as lm-eval sums it up.
        parts: of each document, task by task; empty where a document has no number of its own.
    """

    value: float
    parts: list[np.ndarray]


@offline()
def run_tasks(tasks: Sequence[ConfigurableTask], answers: Answers, limit: int | None) -> list[dict[str, Measured]]:
    """The metrics at each point, by name; of the first ``limit`` documents of each task.

    Several tasks are summed up over all their documents, as lm-eval's groups that weigh by size.
    """
    found, named = [], {task.config.task: task for task in tasks}
    for task in tasks:
        _build_once(task)
    for p in range(len(answers.scorer.points)):
        result = evaluate(
            HarnessLM(answers, p),
            {"tasks": dict(named), "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=0,
            log_samples=True,
        )
        assert result is not None
        by_task = [_metrics(result, name) for name in named]
        metrics = {}
        for label in by_task[0]:
            parts = [one[label] for one in by_task]
            sizes = [max(1, len(part.parts[0])) for part in parts]
            value = sum(part.value * n for part, n in zip(parts, sizes, strict=True)) / sum(sizes)
            metrics[label] = Measured(parts[0].value if len(parts) == 1 else value, [part.parts[0] for part in parts])
        found.append(metrics)
    return found


def _metrics(result: dict[str, Any], name: str) -> dict[str, Measured]:
    """What lm-eval says of one task."""
    metrics = {}
    for key, value in result["results"][name].items():
        metric, _, kind = key.partition(",")
        if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        each = [one.get(metric) for one in result["samples"][name] if one.get("filter", kind) == kind]
        plain = all(isinstance(x, int | float | np.number) for x in each)
        label = metric if kind == "none" else f"{metric} ({kind})"
        metrics[label] = Measured(float(value), [np.array(each if plain else [], dtype=float)])
    return metrics


def _build_once(task: ConfigurableTask) -> None:
    """The requests are the same at every point, and a template takes longer than a small model."""
    build, built = task.build_all_requests, False

    def once(**how: Any) -> None:
        nonlocal built
        if not built:
            build(**how)
            built = True
        for instance in task.instances:
            instance.resps, instance.filtered_resps = [], {}

    task.build_all_requests = once


def quiet() -> None:
    """lm-eval says much that is of no use here, and draws bars beside alcoda's."""
    lm_eval.api.task.tqdm = lambda items, *_, **__: items
    datasets.disable_progress_bars()
    for name in ("lm_eval", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)

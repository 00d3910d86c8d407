"""Is lm-eval's ``local-completions`` against `alcoda serve` the same as `alcoda harness`? The last line is JSON.

    make tasks clients
    .venv-clients/bin/python benchmarks/serve_harness.py [--tasks lambada_openai,arc_easy] [--limit 200]

lm-eval sends token ids to /v1/completions and reads the prompt's log-probabilities out of the answer; `alcoda harness`
scores the same documents in its own process, one text at a time and, told beside it, in its own batches. Compared at
all loops and at tier balanced: every metric to the last digit, and every log-likelihood.

mini holds 128 tokens. A request of lm-eval's takes one of them for a token that it does not look at, so that a text
which is longer would be cut one token sooner than `alcoda harness` cuts it: documents are the first of a task of which
every text fits, and how many were passed over is told. Exit code 1 where a metric or a log-likelihood differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as the command line does

from harness_equal import run_any
from serve_process import serving

import alcoda
from alcoda import progress
from alcoda.downstream import adapter
from alcoda.downstream.encode import Encoder
from alcoda.downstream.score import Scorer, points
from alcoda.downstream.tasks import default_folder

TIER = "balanced"


def fitting(task: Any, lm: Any, limit: int) -> int:
    """Leave the task its first documents of which every text fits, so many at most; how many were passed over."""
    task.build_all_requests(rank=0, world_size=1)
    encoder, room = Encoder(lm.tokenizer), lm.recipe.model.seq_len - 1
    by_document: dict[int, bool] = {}
    for request in task.instances:
        (ask,) = encoder.pairs([request.args])
        fits = len(ask.context) + len(ask.continuation) <= room
        by_document[request.doc_id] = by_document.get(request.doc_id, True) and fits
    keep = [number for number in sorted(by_document) if by_document[number]][:limit]
    split = task.config.test_split or task.config.validation_split
    task.dataset = {split: task.dataset[split].select(keep)}
    task._instances = None
    return (keep[-1] + 1 if keep else 0) - len(keep)


def server_model(url: str, model: str, tokenizer: str, context: int, more: dict[str, Any]) -> Any:
    """lm-eval's own model of a server; ``more``: fields that it sends along."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    class Local(LocalCompletionsAPI):
        def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {**super()._create_payload(*args, **kwargs), **more}

    return (Local if more else LocalCompletionsAPI)(
        base_url=f"{url}/v1/completions",
        model=model,
        tokenizer_backend="huggingface",
        tokenizer=tokenizer,
        max_length=context,
        batch_size=8,
        num_concurrent=1,
    )


def ours(lm: Any, task: Any, limit: int, tier: str | None, batch_size: int | None) -> dict[str, Any]:
    """`alcoda harness` at one point."""
    point = points(lm.loaded, [], [tier] if tier else [])[-1:]
    answers = adapter.Answers(
        lm, Scorer(lm.loaded, point, batch_size), Encoder(lm.tokenizer), lambda what, n: progress.bar(what, n)
    )
    return run_any(adapter.HarnessLM(answers, 0), [task], limit)


def compare(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """What differs."""
    pairs = list(zip(a["responses"], b["responses"], strict=True))
    return {
        "metrics_equal": a["metrics"] == b["metrics"],
        "likelihoods_equal": all(x == y for x, y in pairs),
        "largest_difference": max(abs(x[0] - y[0]) for x, y in pairs),
        "likeliest_differs": sum(x[1] != y[1] for x, y in pairs),
        "requests": len(pairs),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="lambada_openai,arc_easy")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--data", type=Path, default=default_folder())
    parser.add_argument("--model", default="mini")
    options = parser.parse_args(arguments)
    os.environ["OPENAI_API_KEY"] = "none"
    os.environ["NO_PROXY"] = "127.0.0.1"
    adapter.quiet()
    lm = alcoda.load(options.model, device="cpu")
    context = lm.recipe.model.seq_len
    tasks, passed_over = {}, {}
    for name in options.tasks.split(","):
        tasks[name] = adapter.load_task(name, options.data)
        passed_over[name] = fitting(tasks[name], lm, options.limit)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, serving(options.model) as served:
        tokenizer = str(Path(folder) / "hf")
        alcoda.export(options.model, tokenizer)
        for tier in (None, TIER):
            model = served.said["models"][0].partition(":")[0]
            more = {"exit": "none"} if tier is None else {}
            theirs = server_model(served.url, model if tier is None else f"{model}:{tier}", tokenizer, context, more)
            for name, task in tasks.items():
                there = run_any(theirs, [task], options.limit)
                one, many = (ours(lm, task, options.limit, tier, n) for n in (1, None))
                row: dict[str, Any] = {
                    "task": name,
                    "exit": tier,
                    "documents": len(task.eval_docs),
                    **compare(one, there),
                }
                row |= {"metrics": there["metrics"], "harness": one["metrics"], "passed_over": passed_over[name]}
                row |= {"batched": compare(many, there), "server_s": there["seconds"], "harness_s": one["seconds"]}
                rows.append(row)
                same = "equal" if row["metrics_equal"] and row["likelihoods_equal"] else "NOT EQUAL"
                print(
                    f"{name}, exit {tier}: {same}; log-likelihoods within {row['largest_difference']:.2g} (batched "
                    f"{row['batched']['largest_difference']:.2g}); server {row['server_s']:.1f} s, {there['metrics']}",
                    flush=True,
                )
    print(json.dumps({"model": options.model, "limit": options.limit, "rows": rows}, default=str))
    sys.exit(0 if all(row["metrics_equal"] and row["likelihoods_equal"] for row in rows) else 1)


if __name__ == "__main__":
    main()

"""Is `alcoda harness` lm-eval's own ``hf`` model on the same weights, and how long do both take? The last line is JSON.

    python benchmarks/harness_equal.py MODEL HF_FOLDER [--tasks lambada_openai,arc_easy] [--limit 200] [--shots 0]

MODEL is what `alcoda.load` takes (a run, or the folder of another project's model), HF_FOLDER the same weights as
transformers reads them. Both get the same documents of the same task objects, with the same shots, in fp32, at the
depth that MODEL has where none is named; of a group such as mmlu, --limit documents of each subject. Told of each:
whether every metric that counts rights and wrongs is equal to the last digit, the largest
difference of a log-likelihood, on how many requests the two differ in what is likeliest, and the seconds of each, hf at
each of --hf-batch rows (the best counts). It needs lm-eval, transformers and accelerate, and the tasks' data (make
tasks, or --data). Exit code 1 where a metric differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from lm_eval.api.metrics import aggregate_subtask_metrics

import alcoda
from alcoda import progress
from alcoda.downstream import adapter
from alcoda.downstream.encode import Encoder
from alcoda.downstream.score import Scorer, points
from alcoda.downstream.tasks import default_folder, members

Response = tuple[float, bool]


def run_ours(lm: Any, tasks: list[Any], limit: int, loops: list[int], batch_size: int | None) -> dict[str, Any]:
    """Metrics, responses and seconds of our adapter."""
    scorer = Scorer(lm.loaded, points(lm.loaded, loops), batch_size)
    answers = adapter.Answers(lm, scorer, Encoder(lm.tokenizer), lambda what, n: progress.bar(what, n))
    return run_any(adapter.HarnessLM(answers, 0), tasks, limit)


def run_any(model: Any, tasks: list[Any], limit: int) -> dict[str, Any]:
    """The same of any model of lm-eval's; of several tasks with what lm-eval makes of them as a group."""
    named, began = {task.config.task: task for task in tasks}, time.perf_counter()
    for task in tasks:
        task.set_fewshot_seed(adapter.SHOTS_SEED)  # the same shots again
    found = adapter.evaluate(
        model, {"tasks": named, "groups": {}, "group_map": {}}, limit=limit, bootstrap_iters=0, log_samples=True
    )
    seconds = time.perf_counter() - began
    samples = {name: found["samples"][name] for name in named}
    responses: list[Response] = [
        (float(response[0]), bool(response[1]))
        for of_task in samples.values()
        for one in of_task
        for response in one["filtered_resps"]
    ]
    sizes = [len(of_task) for of_task in samples.values()]
    metrics: dict[str, float] = {}
    for key in next(iter(found["results"].values())):
        values = [found["results"][name][key] for name in named]
        if "," in key and "_stderr" not in key and all(isinstance(value, int | float) for value in values):
            metrics[key] = float(aggregate_subtask_metrics(values, sizes))
    return {"metrics": metrics, "responses": responses, "seconds": seconds}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What differs. A perplexity is the exponential of a mean of log-likelihoods, and is judged by those."""
    pairs = list(zip(ours["responses"], theirs["responses"], strict=True))
    rights = [key for key in ours["metrics"] if not key.startswith("perplexity")]
    return {
        "equal": all(ours["metrics"][key] == theirs["metrics"][key] for key in rights),
        "ours": ours["metrics"],
        "hf": theirs["metrics"],
        "requests": len(pairs),
        "largest_difference": max(abs(a[0] - b[0]) for a, b in pairs),
        "likeliest_differs": sum(a[1] != b[1] for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("hf_folder")
    parser.add_argument("--tasks", default="lambada_openai,arc_easy")
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--shots", type=int, default=0)
    parser.add_argument("--loops", type=int)
    parser.add_argument("--data", type=Path, default=default_folder())
    parser.add_argument("--batch-size", type=int, help="rows that ours reads at a time; default: its own choice")
    parser.add_argument("--hf-batch", default="1,8", help="rows that hf reads at a time")
    parser.add_argument("--repeats", type=int, default=1, help="of the times, A B A B")
    asked = parser.parse_args()

    from lm_eval.models.huggingface import HFLM

    adapter.quiet()
    lm = alcoda.load(asked.model, device="cpu", dtype="float32")
    batches = [int(text) for text in asked.hf_batch.split(",")]
    hf = {n: HFLM(pretrained=asked.hf_folder, dtype="float32", device="cpu", batch_size=n) for n in batches}
    loops = [] if asked.loops is None else [asked.loops]
    found: dict[str, Any] = {}
    for name in asked.tasks.split(","):
        tasks = [adapter.load_task(one, asked.data, asked.shots) for one in members(name)]
        ours_s: list[float] = []
        hf_s: dict[int, list[float]] = {n: [] for n in batches}
        ours, theirs = {}, {}
        run_ours(lm, tasks, 2, loops, asked.batch_size)  # what is made at the first use counts for nobody
        for model in hf.values():
            run_any(model, tasks, 2)
        for _ in range(max(1, asked.repeats)):
            ours = run_ours(lm, tasks, asked.limit, loops, asked.batch_size)
            ours_s.append(ours["seconds"])
            for n, model in hf.items():
                theirs = run_any(model, tasks, asked.limit)
                hf_s[n].append(theirs["seconds"])
        best = min(median(times) for times in hf_s.values())
        found[name] = {
            **compare(ours, theirs),
            "ours_s": median(ours_s),
            "hf_s": {str(n): median(times) for n, times in hf_s.items()},
            "hf_over_ours": best / median(ours_s),
        }
        one = found[name]
        print(
            f"{name}: {'equal' if one['equal'] else 'NOT EQUAL'}; log-likelihoods within "
            f"{one['largest_difference']:.2g}; ours {one['ours_s']:.1f} s, hf {best:.1f} s"
        )
    print(json.dumps({"model": asked.model, "limit": asked.limit, "shots": asked.shots, "tasks": found}))
    sys.exit(0 if all(one["equal"] for one in found.values()) else 1)


if __name__ == "__main__":
    main()

"""Whether the engine computes what replaying exits computes, on held-out texts. The last line is JSON.

    python benchmarks/engine_replay.py RUN [--texts 1000] [--prompt 64] [--new 32] [--rule state] [--loops 8]

Held-out texts of RUN (of its validation split, prompts of 1 to 64 tokens) go through the engine in fp64, many at one
time, with exits and the wavefront. Each is then replayed in one pass, as evaluation reads it (`alcoda.depth.replay`):
the tokens that were drawn are the likeliest ones there, every token left after the same loop, and logits are equal to
1e-9. Thresholds lie between scores of the first texts, so that tokens leave at all loops, and decisions that a rounding
could turn are counted.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alcoda.depth.replay import replay
from alcoda.depth.rules import ExitRule, Scored, read_rule
from alcoda.depth.watch import ExitTest
from alcoda.engine.engine import Engine
from alcoda.engine.options import Options
from alcoda.engine.request import Completion, Request, Step
from alcoda.engine.sampling import Drawn, Row
from alcoda.measure.text import streams_of
from alcoda.model.lm import RecurrentLM
from alcoda.training.load import LoadedRun, load_run

ATOL = 1e-9
"""Of logits in fp64: sums are taken in another order."""
NEAR = 1e-12
"""Relative distance of a score from its threshold at which a rounding may decide."""


class Recorder(Engine):
    """An engine that keeps the logits that each token was drawn from, by completion."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logits: dict[Completion, list[Tensor]] = {}
        self._newest: list[tuple[Drawn | str, Tensor]] = []

    def _draw(self, logits_NV: Tensor, rows: list[Row]) -> list[Drawn | str]:
        drawn = super()._draw(logits_NV, rows)
        self._newest = list(zip(drawn, logits_NV.clone(), strict=True))
        return drawn

    def _keep(self, completion: Completion, drawn: Drawn | str, loops: int, steps: tuple[Step, ...]) -> int | None:
        self.logits.setdefault(completion, []).append(next(x for one, x in self._newest if one is drawn))
        return super()._keep(completion, drawn, loops, steps)

    def logits_TV(self, completion: Completion) -> Tensor:
        """Of a completion's tokens, in their order."""
        return torch.stack(self.logits[completion])


def between_scores(model: RecurrentLM, rule: ExitRule, ids_BT: Tensor, n_loops: int) -> ExitRule:
    """The rule, at thresholds under which a third of the scores of some texts lie at each loop, where none leaves."""
    if not isinstance(rule, Scored):
        return rule
    scores_BTR = replay(model, ids_BT, rule, n_loops, scores=True).scores_BTR
    assert scores_BTR is not None
    found = []
    for scores_BT in scores_BTR.unbind(-1):
        sorted_N = scores_BT[scores_BT.isfinite()].double().sort().values
        at = len(sorted_N) // 3
        found.append(float(sorted_N[at : at + 2].mean()) if len(sorted_N) > 1 else 0.0)
    return rule.model_copy(update={"threshold": tuple(found)})


@torch.no_grad()
def compare(
    engine: Recorder, prompts: Sequence[Sequence[int]], n_new: int, test: ExitTest, tell: Callable[[int], None]
) -> dict[str, Any]:
    """Decode prompts in the engine and replay what came: how many tokens, depths and logits are not those of replay."""
    found: dict[str, Any] = {"texts": 0, "tokens": 0, "other_tokens": 0, "other_depths": 0, "logits_off": 0.0}
    found |= {"near_ties": 0, "failed": 0}
    thresholds_R = test.threshold_R
    for (completion,) in engine.run([Request(tuple(prompt), n_new, test=test) for prompt in prompts]):
        found["texts"] += 1
        if completion.error is not None:
            found["failed"] += 1
            continue
        n_prompt, ids = len(completion.request.prompt), [token.token for token in completion.tokens]
        # Of the last token that was drawn nothing was run.
        text_1T = torch.tensor([[*completion.request.prompt, *ids[:-1]]])
        replayed = replay(engine.model, text_1T, test, scores=True)
        logits_TV = engine.model.logits(replayed.y_BTD)[0, n_prompt - 1 :, : engine.n_vocab]
        loops = [*completion.prompt_loops, *(token.loops for token in completion.tokens[1:])]
        assert replayed.scores_BTR is not None
        off_R = (replayed.scores_BTR[0].double() / thresholds_R.clamp(min=1e-300) - 1).abs()
        found["near_ties"] += int((off_R < NEAR).sum())
        found["tokens"] += len(ids)
        found["other_tokens"] += sum(a != b for a, b in zip(logits_TV.argmax(-1).tolist(), ids, strict=True))
        found["other_depths"] += sum(a != b for a, b in zip(replayed.depths_BT[0].tolist(), loops, strict=True))
        off = float((logits_TV - engine.logits_TV(completion)[:, : engine.n_vocab]).abs().max())
        found["logits_off"] = max(found["logits_off"], off)
        del engine.logits[completion]
        tell(found["texts"])
    engine.check_idle()
    found["mean_loops"], found["accepted"] = engine.stats.mean_loops, engine.stats.accepted
    found["loops"] = {str(depth): n for depth, n in sorted(engine.stats.loops.items())}
    wrong = found["other_tokens"] or found["other_depths"] or found["failed"]
    found["equal"] = not wrong and found["logits_off"] <= ATOL
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run, or the name of a model of the package")
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--rule", default="state", help="an exit rule with thresholds: they are chosen here")
    parser.add_argument("--loops", type=int, help="the model's own where not set")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--draft-loops", type=int, default=2)
    options = parser.parse_args(arguments)
    loaded = load_run(options.run, device="cpu", dtype="float32")
    model = loaded.model.double()
    n_loops = model.config.n_loops if options.loops is None else options.loops
    rows = held_out(loaded, options.texts, options.prompt)
    rule = between_scores(model, read_rule(options.rule), torch.tensor(rows[:32]), n_loops)
    prompts = [row[: 1 + i % options.prompt] for i, row in enumerate(rows)]
    test = rule.build(model, n_loops)
    how = Options(width=options.width, draft_loops=options.draft_loops)
    n_vocab = loaded.tokenizer.vocab_size
    engine = Recorder(model, how, n_loops=n_loops, dtype=torch.float64, n_vocab=n_vocab)
    began = time.perf_counter()
    found = compare(
        engine,
        prompts,
        options.new,
        test,
        lambda n: None if n % 100 else print(f"  {n} texts compared", flush=True),
    )
    found |= {"run": options.run, "rule": rule.kind, "n_loops": n_loops, "seconds": time.perf_counter() - began}
    print(json.dumps(found))


def held_out(loaded: LoadedRun, n_texts: int, n_tokens: int) -> list[list[int]]:
    """Rows of the validation split, from its sources in turn; fewer where it has not so many."""
    streams = list(streams_of(loaded, "valid").values())
    found: list[list[int]] = []
    row = 0
    while len(found) < n_texts and any((row + 1) * n_tokens <= stream.n_tokens for stream in streams):
        here = [stream for stream in streams if (row + 1) * n_tokens <= stream.n_tokens]
        found += [stream.read(row * n_tokens, (row + 1) * n_tokens).tolist() for stream in here]
        row += 1
    return found[:n_texts]


if __name__ == "__main__":
    main()

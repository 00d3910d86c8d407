"""The page at ``/``: static files, and what they ask for beside the API (docs/serving.md)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from alcoda.serve.errors import json_response

if TYPE_CHECKING:
    from alcoda.engine.llm import LM
    from alcoda.training.recipe import Recipe
    from alcoda.training.run import RunFolder

LOG = logging.getLogger("alcoda.serve")
STATIC = Path(__file__).with_name("static")
HEADERS = {
    # What a model writes is only ever text: the browser runs nothing but the page's own files, and takes no markup.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
    "Accept-Ranges": "none",
}
PROMPTS = ("Once upon a time", "The old king")


class _Files(StaticFiles):
    """Static files with the page's headers, always whole: a range that is wrong would be an error of another form."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        scope["headers"] = [one for one in scope["headers"] if one[0] != b"range"]
        return await super().get_response(path, scope)

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        answer = super().file_response(*args, **kwargs)
        answer.headers.update(HEADERS)
        return answer


def mount(app: Any) -> None:
    """Put the page into a FastAPI app: ``/``, its files under ``/page/``, and ``/page/lab.json``. ``app.state.worker``
    is the `alcoda.serve.worker.Worker`."""
    files = _Files(directory=STATIC)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    @app.get("/page/lab.json", include_in_schema=False)
    def lab() -> Response:
        worker = app.state.worker
        worker.check_ready()
        return json_response(about(worker.lm), headers={"Cache-Control": "no-store"})

    app.mount("/page", files, name="page")


def about(lm: LM) -> dict[str, Any]:
    """What the page shows beside the texts: the lab's histogram (null, and why, where there is none of this model),
    the facts of its tiers, and prompts to begin with."""
    run = lm.loaded.run
    lab, note = _lab(run, lm.loaded.train_step)
    return {"lab": lab, "note": note, "tiers": _tiers(run), "examples": [*PROMPTS, *_chains(lm.recipe)]}


def _lab(run: RunFolder, train_step: int) -> tuple[dict[str, Any] | None, str | None]:
    from alcoda.errors import RunError, UsageError
    from alcoda.report.lab import read_lab

    for folder in _measured(run):
        path = folder.lab / "lab.json"
        if not path.exists():
            continue
        try:
            found = read_lab(path)
        except (RunError, UsageError) as error:
            LOG.warning("the page shows no lab: %s", error)
            return None, f"The lab of this run cannot be read: {error}"
        if found is None or found.train_step != train_step:
            continue
        histogram = [{"depth": d, "settled": n, "censored": late} for d, n, late in found.histogram]
        told = {"data": found.data, "n_tokens": found.n_tokens, "loops": found.loops, "eps": found.eps}
        return {**told, "histogram": histogram}, None
    return None, "No lab of these weights: alcoda lab RUN measures when the tokens of a longer text settle."


def _measured(run: RunFolder) -> list[RunFolder]:
    """Where measurements of a run may lie: of one that comes with the package, its copy first, if there is one."""
    from alcoda.errors import RunError, UsageError
    from alcoda.training.run import SHIPPED, RunFolder

    if run.path.parent == SHIPPED and RunFolder(Path("runs") / run.path.name).exists:
        try:
            return [run.writable(), run]
        except (RunError, UsageError):  # another run lies there
            return [run]
    return [run]


def _tiers(run: RunFolder) -> dict[str, Any]:
    from alcoda.depth.tiers import Tiers
    from alcoda.errors import RunError, UsageError

    if not run.exits_json.exists():
        return {}
    try:
        found = Tiers.load(run.exits_json)
    except (RunError, UsageError):  # the server has said so, and offers no tier
        return {}
    return {
        tier.name: {
            "rule": tier.rule.model_dump(mode="json"),
            "tolerance": tier.tolerance,
            "mean_loops": tier.held_out.mean_loops,
        }
        for tier in found.tiers
    }


def _chains(recipe: Recipe) -> list[str]:
    """Of a model that learnt pointer chasing: definitions that it has not seen, up to the first question."""
    from alcoda.data.corpora import corpus

    specs = [recipe.data.corpus, *(source.corpus for source in recipe.data.mix or ())]
    spec = next((spec for spec in specs if spec and spec.startswith("hops:")), None)
    if spec is None or "seed=" in spec:
        return []
    document = next(iter(corpus(f"{spec},seed=1").documents()), "")
    return [document[: document.find("?") + 1]] if "?" in document else []

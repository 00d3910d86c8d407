"""The app: routes, and what each may answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response

from alcoda.errors import UsageError
from alcoda.serve import page
from alcoda.serve.answers import answer
from alcoda.serve.errors import ApiError, json_response
from alcoda.serve.gate import Gate, needs_key
from alcoda.serve.metrics import CONTENT_TYPE
from alcoda.serve.origin import Cross, Origins
from alcoda.serve.protocol import ChatBody, CompletionBody, TokenizeBody, check_type, read
from alcoda.serve.schema import documented
from alcoda.serve.worker import Worker, described
from alcoda.version import __version__


def make_app(worker: Worker) -> FastAPI:
    """The app of a worker, which it starts and closes."""
    settings = worker.settings

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncGenerator[None]:
        worker.start()
        try:
            yield
        finally:
            await worker.close()

    # A browser's question before the question has no key: what answers it stands before the gate.
    cross = Middleware(
        Cross,
        allow_origins=list(settings.allow_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )
    gate = Middleware(
        Gate,
        keys=settings.keys(),
        open_metrics=settings.open_metrics,
        worker=worker,
        origins=Origins(settings.host, settings.allow_origins),
    )
    app = FastAPI(
        title="alcoda",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        middleware=[cross, gate] if settings.allow_origins else [gate],
        redirect_slashes=False,
    )
    app.state.worker = worker
    _errors(app)
    _health(app, worker)
    _routes(app, worker)
    page.mount(app)
    is_locked = needs_key(settings.keys(), settings.open_metrics)
    app.openapi = lambda: documented(app, get_openapi, is_locked)  # pyrefly: ignore
    return app


def _errors(app: FastAPI) -> None:
    async def of_api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def of_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = {
            404: f"there is no {request.url.path}",
            405: f"{request.url.path} does not take {request.method}",
        }.get(error.status_code, error.detail)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, text, code=code, headers=_plain(error.headers)).response()

    async def of_bug(request: Request, error: Exception) -> Response:
        return ApiError(500, f"{type(error).__name__} in the server; its log says more", code="internal").response()

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_bug)


def _plain(headers: Mapping[str, str] | None) -> dict[str, str] | None:
    return None if headers is None else dict(headers)


def _health(app: FastAPI, worker: Worker) -> None:
    @app.api_route(
        "/health",
        methods=["GET", "HEAD"],
        summary="Whether the process works, or may come to: else start it anew.",
    )
    async def health() -> Response:
        if not worker.is_alive:
            raise ApiError(503, "the engine has stopped", code="stopped")
        return json_response({"status": "ok"})

    @app.api_route("/ready", methods=["GET", "HEAD"], summary="Whether requests are taken now.")
    async def ready() -> Response:
        worker.check_ready()
        return json_response({"status": "ready", "models": list(worker.catalogue.models())})

    @app.get("/metrics", summary="For Prometheus.")
    async def metrics() -> Response:
        try:
            worker.check_ready()
            worker.metrics.ready.set(1)
        except ApiError:
            worker.metrics.ready.set(0)
        return Response(worker.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version", summary="Of alcoda.")
    async def version() -> Response:
        return json_response({"version": __version__})


def _routes(app: FastAPI, worker: Worker) -> None:
    is_json = [Depends(check_type)]

    @app.get("/v1/models", summary="One set of weights, a model for each tier.")
    async def models() -> Response:
        worker.check_ready()
        return json_response({"object": "list", "data": described(worker)})

    @app.get("/v1/models/{model}", summary="One of them.")
    async def model(model: str) -> Response:
        worker.check_ready()
        worker.catalogue.tier_of(model)
        return json_response(next(one for one in described(worker) if one["id"] == model))

    @app.post("/v1/completions", dependencies=is_json, summary="What follows a prompt.")
    async def completions(request: Request) -> Response:
        return await answer(worker, request, CompletionBody)

    @app.post("/v1/chat/completions", dependencies=is_json, summary="What the assistant says next.")
    async def chat(request: Request) -> Response:
        return await answer(worker, request, ChatBody)

    @app.post("/tokenize", dependencies=is_json, summary="The tokens of a text.")
    async def tokenize(request: Request) -> Response:
        worker.check_ready()
        body = read(TokenizeBody, await request.body())
        worker.catalogue.tier_of(body.model)
        tokenizer = worker.lm.tokenizer

        def encode() -> Response:
            ids = [
                *([tokenizer.bos] if body.add_special_tokens is not False else []),
                *tokenizer.encode(body.prompt).tolist(),
            ]
            texts = [tokenizer.decode_bytes([i]).decode(errors="replace") for i in ids]
            told = {"tokens": ids, "texts": texts, "count": len(ids), "max_model_len": worker.context}
            return json_response(told)

        try:
            return await worker.read(encode)
        except UsageError as error:
            raise ApiError(400, str(error), param="prompt") from None

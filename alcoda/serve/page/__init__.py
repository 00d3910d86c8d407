"""The page at ``/``: static files, and what they ask for beside the API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

STATIC = Path(__file__).with_name("static")


def mount(app: Any) -> None:
    """Put the page into a FastAPI app: ``/``, and its files under ``/page/``. ``app.state.worker`` is the
    `alcoda.serve.worker.Worker`."""

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/page", StaticFiles(directory=STATIC), name="page")

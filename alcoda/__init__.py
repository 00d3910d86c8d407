"""alcoda trains and measures recurrent-depth language models, and generates text with them.

>>> import alcoda
>>> lm = alcoda.load("runs/quickstart")
>>> print(lm.generate("def main(", loops=8, temperature=0.7))
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from alcoda.version import __version__ as __version__

if TYPE_CHECKING:
    from alcoda.api import (
        LM,
        ModelConfig,
        Recipe,
        bench_engine,
        bench_serve,
        calibrate,
        capacity,
        check_laws,
        cost,
        evaluate,
        evaluate_caches,
        evaluate_exit,
        evaluate_prefills,
        export,
        fit_probe,
        footprint,
        frontier,
        harness,
        healed,
        import_model,
        lab,
        load,
        load_plugin,
        load_recipe,
        match,
        pack,
        recipes,
        retrofit,
        train,
        write_report,
    )
    from alcoda.serving import server

__all__ = [
    "LM",
    "ModelConfig",
    "Recipe",
    "bench_engine",
    "bench_serve",
    "calibrate",
    "capacity",
    "check_laws",
    "cost",
    "evaluate",
    "evaluate_caches",
    "evaluate_exit",
    "evaluate_prefills",
    "export",
    "fit_probe",
    "footprint",
    "frontier",
    "harness",
    "healed",
    "import_model",
    "lab",
    "load",
    "load_plugin",
    "load_recipe",
    "match",
    "pack",
    "recipes",
    "retrofit",
    "server",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import: only when something is used.
    if name == "server":  # it needs an extra, and no torch yet
        from alcoda import serving

        return serving.server
    if name in __all__:
        from alcoda import api

        return getattr(api, name)
    raise AttributeError(f"module 'alcoda' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if "transformers" in sys.modules:
    # It is told of our models at once. A version that is too old is no reason not to import alcoda.
    with suppress(ImportError, ValueError):
        importlib.import_module("alcoda.interop.hf")

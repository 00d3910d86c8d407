"""Does anything that can be sent to `alcoda serve` break it, or get an answer that its document does not name? The last
line is JSON.

    make clients && .venv-clients/bin/python benchmarks/serve_fuzz.py [--minutes 10] [--seed 0]

schemathesis takes the OpenAPI document of ``alcoda serve mini``, started here, and makes requests of it that are right
and that are wrong, round after round, each with another seed (serve_fuzz_hooks.py: most leave out what would have them
refused at once). Exit code 1 at a 5xx, a status or content type that the
document does not name, an answer of another form than it says, a method that is not there and is answered otherwise
than by 405, a fault in the server's log, or a server that is not ready, not idle or not alive behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_process import serving
from serve_soak import IDLE_S, busy

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
ROUND_S = 120
KEY = "fuzzed"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(arguments)
    schemathesis = Path(sys.executable).with_name("schemathesis")
    if not schemathesis.exists():
        sys.exit("schemathesis is not here: make clients, and .venv-clients/bin/python benchmarks/serve_fuzz.py")
    rounds: list[dict[str, Any]] = []
    failures: list[str] = []
    # A queue that is short, and a deadline: what a request may meet it meets.
    how = ("--max-waiting", "8", "--deadline", "20", "--api-key", KEY)
    with tempfile.TemporaryDirectory() as folder, serving(options.model, *how) as served:
        until, seed = time.perf_counter() + options.minutes * 60, options.seed
        while (left_s := until - time.perf_counter()) > 1 and served.is_alive:
            said = fuzz(
                schemathesis, served.url, seed, max(1, int(min(left_s, ROUND_S))), options.workers, Path(folder)
            )
            rounds.append(said)
            if said["code"] != 0:
                failures.append(f"seed {seed}: exit code {said['code']}")
            seed += 1
        began = time.perf_counter()
        while (left := busy(metrics(served.url))) and time.perf_counter() - began < IDLE_S:
            time.sleep(0.2)
        if left:
            failures.append(f"not free {IDLE_S:g} s behind the last request: {left}")
        answers = {name: n for name, n in metrics(served.url).items() if name.startswith("alcoda_requests_total")}
        if not served.is_alive or served.get("/ready")[0] != 200:
            failures.append("it is not ready any more")
        failures += served.complaints()
        memory_mb = served.resident_mb if served.is_alive else None
    cases = sum(one["cases"] for one in rounds)
    found: dict[str, Any] = {"minutes": options.minutes, "rounds": len(rounds), "cases": cases, "failures": failures}
    found |= {"answers": answers}
    print(json.dumps({**found, "resident_mb": memory_mb, "checks": CHECKS}))
    sys.exit(1 if failures or not cases else 0)


def fuzz(tool: Path, url: str, seed: int, seconds: int, workers: int, folder: Path) -> dict[str, Any]:
    """One round, its output on ours; the exit code and how many requests it made."""
    report = folder / f"{seed}.ndjson"
    command = [str(tool), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--seed", str(seed)]
    command += ["--max-time", str(seconds), "--workers", str(workers), "--request-timeout", "60", "--no-color"]
    command += ["--header", f"Authorization:Bearer {KEY}", "--report", "ndjson", "--report-ndjson-path", str(report)]
    here = Path(__file__).parent
    more = {"NO_PROXY": "*", "SCHEMATHESIS_HOOKS": "serve_fuzz_hooks", "PYTHONPATH": str(here)}
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, env=os.environ | more)
    print(done.stdout[-20_000:], done.stderr[-5_000:], flush=True)
    found = re.search(r"([\d,]+) generated", done.stdout)
    return {"code": done.returncode, "cases": int(found[1].replace(",", "")) if found else 0}


def metrics(url: str) -> dict[str, float]:
    """Of a server that wants a key."""
    import httpx
    from serve_process import read_metrics

    answer = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=10)
    return read_metrics(answer.text)


if __name__ == "__main__":
    main()

"""What /metrics shows: of the server, and of the engine at the time it is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from alcoda.serve.worker import Worker

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Of one app. Labels are few and of fixed sets: no user, no key, no text."""

    def __init__(self) -> None:
        self.created = int(time.time())
        self.registry = CollectorRegistry()
        how: Any = {"registry": self.registry}
        self.requests = Counter("alcoda_requests", "Answers by endpoint and HTTP code.", ["endpoint", "code"], **how)
        self.finished = Counter("alcoda_completions", "Completions that ended, by how.", ["finish"], **how)
        self.tiers = Counter("alcoda_tier_requests", "Requests by the tier that they ran at.", ["tier"], **how)
        self.queue_s = Histogram("alcoda_queue_seconds", "From a request to its place.", buckets=SECONDS, **how)
        self.first_s = Histogram(
            "alcoda_time_to_first_token_seconds", "From a request to its first token.", buckets=SECONDS, **how
        )
        self.next_s = Histogram(
            "alcoda_inter_token_seconds", "Between the tokens of a completion.", buckets=STEPS, **how
        )
        self.whole_s = Histogram("alcoda_request_seconds", "From a request to its end.", buckets=SECONDS, **how)
        self.prompt_tokens = Counter("alcoda_prompt_tokens", "Of requests that were let in.", **how)
        self.tokens = Counter("alcoda_generated_tokens", "Of completions that ended.", **how)
        self.loops = Counter("alcoda_token_loops", "Loops that those tokens ran.", **how)
        self.full_loops = Counter("alcoda_token_full_depth_loops", "Loops that full depth would have run.", **how)
        self.audited = Counter("alcoda_audit_tokens", "Tokens that were read again at full depth.", **how)
        self.disagreed = Counter(
            "alcoda_audit_disagreements", "Those of them whose likeliest next token is another one there.", **how
        )
        self.unaudited = Counter("alcoda_audit_dropped", "Audits that found no idle time.", **how)
        self.ready = Gauge("alcoda_ready", "1 where requests are taken.", **how)

    def watch(self, worker: Worker) -> None:
        """Show what ``worker``'s engine does, too."""
        self.registry.register(_OfEngine(worker))

    def text(self) -> bytes:
        """All of it, for Prometheus."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        worker = self.worker
        assert worker.service is not None
        engine = worker.service.background.engine
        stats, arena = engine.stats, engine.runner.arena
        n_running = len(engine.running)
        for name, text, value in (
            ("running", "Completions that have a place.", n_running),
            ("waiting", "Completions that wait for one.", max(0, worker.n_open - n_running)),
            ("places", "Completions that can run at one time.", engine.places),
            ("cache_tokens_used", "Of the engine's cache.", arena.n_tokens - arena.n_free),
            ("cache_tokens", "Room of the engine's cache.", arena.n_tokens),
            ("stalled_seconds", "Since the engine last went on, with work to do.", worker.service.background.stalled_s),
        ):
            yield GaugeMetricFamily(f"alcoda_{name}", text, value)
        for name, text, value in (
            ("engine_tokens", "Drawn and kept.", stats.tokens),
            ("engine_prompt_tokens", "Read.", stats.prompt_tokens),
            ("engine_failures", "Completions that failed.", stats.failures),
            ("drafts", "Tokens drafted.", stats.drafts),
            ("drafts_checked", "Drafts held against what was drawn in the end.", stats.checked),
            ("drafts_accepted", "Those that were right.", stats.accepted),
        ):
            yield CounterMetricFamily(f"alcoda_{name}", text, value)
        yield _by_kind("launches", "Launches of the engine.", dict(stats.launches))
        yield _by_kind("launch_rows", "Tokens in them: over launches, their mean width.", dict(stats.rows))
        yield _by_kind("launch_seconds", "Time in them.", dict(stats.seconds))
        yield _depths(
            "loops_per_token", "Loops of each token that another was drawn from.", dict(stats.loops), engine.n_loops
        )
        yield _depths(
            "loops_per_prompt_token", "Loops of each token of prompts.", dict(stats.prompt_loops), engine.n_loops
        )


def _by_kind(name: str, text: str, values: Mapping[str, float]) -> CounterMetricFamily:
    found = CounterMetricFamily(f"alcoda_{name}", text, labels=["kind"])
    for kind in ("core", "coda", "piece"):
        found.add_metric([kind], values.get(kind, 0))
    return found


def _depths(name: str, text: str, counts: Mapping[int, int], most: int) -> HistogramMetricFamily:
    buckets, below = [], 0
    for depth in range(1, most + 1):
        below += counts.get(depth, 0)
        buckets.append((str(float(depth)), below))
    buckets.append(("+Inf", sum(counts.values())))
    total = sum(depth * n for depth, n in counts.items())
    return HistogramMetricFamily(f"alcoda_{name}", text, buckets=buckets, sum_value=total)

"""``alcoda bench serve`` against a scripted server: what it counts is what was sent."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from fake_openai import KEY, LOOPS, fake_server
from typer.testing import CliRunner

import alcoda
from alcoda import api
from alcoda.bench_command import app
from alcoda.errors import RunError, UsageError
from alcoda.serve.load.bench import bench_serve
from alcoda.serve.load.client import Answer, Client, base_url
from alcoda.serve.load.drive import Driven, arrivals, closed_loop, open_loop
from alcoda.serve.load.prompts import BUILT_IN, read_prompts
from alcoda.serve.load.score import LoadResult, Quantiles, is_good, score
from alcoda.serve.server import Server

pytest.importorskip("httpx")


def answer(due: float = 0.0, first: float = 0.1, gaps: list[float] | None = None, **more: object) -> Answer:
    gaps = [0.01, 0.03] if gaps is None else gaps
    found = Answer(due, due, due + first, gaps, due + first + sum(gaps), None, tokens=len(gaps) + 1)
    for name, value in more.items():
        setattr(found, name, value)
    return found


def test_numbers_of_known_answers() -> None:
    whole = [answer(0, 0.1, loops=6), answer(1, 0.2, loops=9), answer(2, 0.9, loops=9)]
    failed = [Answer(3.0, 3.0, error="429"), Answer(3.1, 3.1, error="429"), Answer(3.2, 3.2, error="timeout")]
    driven = Driven([*whole, *failed], 0.0, 4.0, [0.001, 0.002], [0.0, 0.001])
    found = score(driven, "m", 500, 50, rate_per_s=1.5)
    assert (found.requests, found.completed, found.errors) == (6, 3, {"429": 2, "timeout": 1})
    assert found.ttft_ms is not None and found.itl_ms is not None and found.e2e_ms is not None
    assert found.ttft_ms.p50 == pytest.approx(200)
    assert found.itl_ms == Quantiles(pytest.approx(20), pytest.approx(30), pytest.approx(30))
    assert found.e2e_ms.p50 == pytest.approx(240)
    assert (found.output_tokens, found.output_tokens_per_s) == (9, pytest.approx(2.25))
    assert found.mean_loops == pytest.approx(24 / 9)
    assert (found.good, found.goodput_per_s, found.good_share) == (2, pytest.approx(0.5), pytest.approx(1 / 3))
    assert not found.is_late


def test_a_request_is_good_that_met_both_targets() -> None:
    assert is_good(answer(first=0.4), 500, 25)
    assert not is_good(answer(first=0.6), 500, 25)
    assert not is_good(answer(first=0.4), 500, 19)  # 20 ms a token
    assert is_good(answer(first=0.4, gaps=[]), 500, 1)  # of one token
    # Two tokens came in one text: it is the tokens' mean time that counts.
    assert is_good(answer(first=0.4, tokens=5), 500, 11)


def test_a_late_client_says_so() -> None:
    late = score(Driven([answer()], 0.0, 1.0, [0.006] * 10, [0.0]), "m", 500, 50, rate_per_s=2)
    assert late.is_late
    found = LoadResult("u", 1, 500, 50, 1, 1, 0, (late,), False)
    assert "6.0 ms late" in found.notes[0] and "m, 2/s" in found.notes[0]


def test_a_tier_that_was_not_asked_for_is_told() -> None:
    one = score(Driven([answer(exit="fast"), answer(exit="exact")], 0.0, 1.0), "m:exact", 500, 50, concurrency=2)
    assert one.tiers == {"exact": 1, "fast": 1}
    (note,) = LoadResult("u", 1, 500, 50, 1, 1, 0, (one,), False).notes
    assert "1 at fast" in note


def test_arrivals_are_poisson_and_of_their_seed() -> None:
    times = arrivals(50, 100, random.Random(0))
    assert times == arrivals(50, 100, random.Random(0)) != arrivals(50, 100, random.Random(1))
    assert times == sorted(times) and times[0] > 0 and times[-1] < 100
    assert 4700 < len(times) < 5300
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)
    assert len(arrivals(0.001, 1, random.Random(0))) == 1  # never nothing


def test_open_loop_does_not_wait_for_answers() -> None:
    running, most = 0, 0

    async def send(_: int, one: Answer) -> None:
        nonlocal running, most
        one.sent = time.perf_counter()
        running += 1
        most = max(most, running)
        await everyone.wait()
        one.end, one.error = time.perf_counter(), None

    async def run() -> Driven:
        global everyone
        everyone = asyncio.Event()

        async def release() -> None:
            while running < 20:  # a server that answers nobody before it has all of them
                await asyncio.sleep(0.001)
            everyone.set()

        driven, _ = await asyncio.gather(open_loop(send, [0.001 * i for i in range(20)], 0.02), release())
        return driven

    driven = asyncio.run(run())
    assert most == 20 and [a.error for a in driven.answers] == [None] * 20
    assert len(driven.send_late_s) == 20 and driven.loop_late_s and not driven.interrupted


def test_closed_loop_keeps_so_many_busy() -> None:
    running, most, ended, enough = 0, 0, 0, asyncio.Event()

    async def send(_: int, one: Answer) -> None:
        nonlocal running, most, ended
        one.sent = time.perf_counter()
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.005)
        running -= 1
        one.end, one.error = time.perf_counter(), None
        ended += 1
        if ended == 10:
            enough.set()

    async def run() -> Driven:
        task = asyncio.create_task(closed_loop(send, 3, 600.0))
        await enough.wait()
        task.cancel()
        return await task

    driven = asyncio.run(run())
    assert most == 3 and len(driven.answers) >= 10 and driven.interrupted
    running = 0
    assert len(asyncio.run(closed_loop(send, 3, 0.0)).answers) == 3 and not running, "once each, however late it is"


def test_what_is_cancelled_is_told_as_far_as_it_went() -> None:
    second = asyncio.Event()

    async def send(number: int, one: Answer) -> None:
        one.sent = time.perf_counter()
        if number:
            second.set()
            await asyncio.sleep(600)
        one.end, one.error = time.perf_counter(), None

    async def run() -> Driven:
        task = asyncio.create_task(open_loop(send, [0.0, 0.01, 5000.0], 6000))
        await second.wait()
        task.cancel()
        return await task

    driven = asyncio.run(run())
    assert driven.interrupted and [a.error for a in driven.answers] == [None, "unfinished"]


def test_against_a_server() -> None:
    with fake_server(tier="fast") as fake:
        found = bench_serve(
            fake.url,
            models=["m:fast", "m"],
            rates=[40],
            duration_s=0.5,
            prompts=["a", "b"],
            max_tokens=4,
            ttft_ms=60_000,
            itl_ms=60_000,
        )
    fast, base = found.scores
    assert (fast.model, base.model) == ("m:fast", "m")
    assert fast.requests == fast.completed == fast.good == base.requests > 1
    assert fast.output_tokens == 4 * fast.requests and fast.mean_loops == LOOPS
    assert fast.tiers == {"fast": fast.requests} and fast.errors == {}
    bodies = fake.bodies[2:]  # each model was tried once before
    assert len(bodies) == fast.requests + base.requests
    mine = {m: sorted(b["prompt"] for b in bodies if b["model"] == m) for m in ("m", "m:fast")}
    assert mine["m"] == mine["m:fast"]  # the same requests
    assert all(b["stream"] and b["ignore_eos"] and b["temperature"] == 0 and b["max_tokens"] == 4 for b in bodies)
    assert json.loads(json.dumps(found.to_json()))["scores"][0]["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("prompt", "error"), [("refuse", "429"), ("break", "broken"), ("fail", "server_error"), ("fine", None)]
)
def test_errors_are_told_apart(prompt: str, error: str | None) -> None:
    async def run(url: str) -> Answer:
        async with Client(url) as client:
            one = Answer(time.perf_counter())
            body = {"model": "m", "prompt": prompt, "max_tokens": 4}
            await client.complete(body, one)
        return one

    with fake_server() as fake:
        one = asyncio.run(run(fake.url))
    assert one.error == error and (len(one.gaps_s) == 3) == (error is None)


def test_an_answer_without_text_has_a_first_time() -> None:
    with fake_server() as fake:
        found = bench_serve(fake.url, concurrency=[1], duration_s=0.05, prompts=["mute"], max_tokens=2)
    assert found.scores[0].completed and found.scores[0].ttft_ms is not None and found.scores[0].itl_ms is None


def test_a_server_that_refuses_some_is_measured_all_the_same() -> None:
    with fake_server() as fake:
        found = bench_serve(fake.url, rates=[60], duration_s=0.5, prompts=["fine", "refuse"], max_tokens=2, seed=3)
    (one,) = found.scores
    assert one.errors["429"] + one.completed == one.requests and one.completed
    assert one.good_share < 1


def test_from_a_running_loop() -> None:
    async def notebook(url: str) -> LoadResult:
        return bench_serve(url, concurrency=[1], duration_s=0.05, prompts=["a"], max_tokens=1)

    with fake_server() as fake:
        assert asyncio.run(notebook(fake.url)).scores[0].completed


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"rates": [1], "concurrency": [1]}, "one of them"),
        ({"rates": [0]}, "--rate 0"),
        ({"rates": [float("nan")]}, "--rate nan"),
        ({"rates": [1e9]}, "more than 1,000,000"),
        ({"concurrency": [0]}, "--concurrency 0"),
        ({"duration_s": 0}, "--duration 0"),
        ({"ttft_ms": -1}, "--ttft-ms -1"),
        ({"itl_ms": float("inf")}, "--itl-ms inf"),
        ({"max_tokens": 0}, "--max-tokens 0"),
        ({"prompts": ()}, "at least one"),
        ({"plot": "plot.txt"}, ".svg, .png, .pdf"),
        ({"plot": "nowhere/plot.svg"}, "no folder"),
        ({"api_key": "ключ"}, "ASCII"),
        ({"models": ["n"]}, "no such model"),
        ({"models": ["m:fats"]}, "did you mean 'm:fast'"),
    ],
)
def test_what_cannot_be_is_refused(
    how: dict[str, object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_server() as fake, pytest.raises(UsageError) as caught:
        bench_serve(fake.url, **how)  # pyrefly: ignore
    assert told in str(caught.value) and not fake.bodies


def test_keys() -> None:
    with fake_server(key=KEY) as fake:
        for key in (None, "wrong"):
            with pytest.raises(UsageError, match="--api-key or ALCODA_API_KEY"):
                bench_serve(fake.url, api_key=key)
        assert (
            bench_serve(fake.url, api_key=KEY, concurrency=[1], duration_s=0.05, prompts=["a"], max_tokens=1)
            .scores[0]
            .completed
        )


def test_no_server_and_one_that_refuses_all() -> None:
    with fake_server() as fake:
        gone = fake.url
        with pytest.raises(RunError, match=r"429.*too many"):
            bench_serve(fake.url, prompts=["refuse"])
    with pytest.raises(RunError, match="no server answers"):
        bench_serve(gone)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"])
def test_urls(url: str) -> None:
    assert base_url(url) == "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:70000", "http://[::1", "http://x/?a=b"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(UsageError, match="not a URL"):
        base_url(url)


def test_prompt_files(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("one\n\ntwo\n")
    objects.write_text('{"prompt": "one\\ntwo"}\n')
    assert read_prompts(lines) == ("one", "two") and read_prompts(objects) == ("one\ntwo",)
    for text, told in (
        ("", "empty"),
        ("[1]", "an object with a text"),
        ('{"prompt": 3}', "an object"),
        ("{", "no JSON"),
    ):
        objects.write_text(text)
        with pytest.raises(UsageError, match=told):
            read_prompts(objects)
    lines.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="UTF-8"):
        read_prompts(lines)
    with pytest.raises(UsageError, match="No such file"):
        read_prompts(tmp_path / "none")
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 8


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")
    asked = "--model m --rate 20,40 --duration 0.2 --max-tokens 3 --plot a.svg --out a.json"
    with fake_server() as fake:
        done = CliRunner().invoke(app, ["serve", fake.url, *asked.split()])
        png = CliRunner().invoke(
            app, ["serve", fake.url, *["--concurrency", "1", "--duration", "0.05", "--json", "--plot", "a.png"]]
        )
    assert done.exit_code == 0, done.output
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((tmp_path / "a.json").read_text())
    assert [one["rate_per_s"] for one in found["scores"]] == [20, 40]
    assert "tokens/s" in done.stdout and "20/s" in done.stdout
    assert (tmp_path / "a.svg").read_text().count("<svg") == 1
    assert png.exit_code == 0 and len(png.stdout.strip().splitlines()) == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_command_refuses_bad_numbers(tmp_path: Path) -> None:
    for option, value in (("--rate", "a"), ("--concurrency", "1.5"), ("--out", str(tmp_path / "no" / "a.json"))):
        done = CliRunner().invoke(app, ["serve", "127.0.0.1:1", option, value])
        assert isinstance(done.exception, UsageError) and option in str(done.exception)


def test_ctrl_c_gives_the_table() -> None:
    with fake_server(gap_s=0.01) as fake:
        command = [sys.executable, "-m", "alcoda", "bench", "serve", fake.url, "--rate", "50", "--duration", "60"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while len(fake.bodies) < 10:
                assert process.poll() is None
                time.sleep(0.02)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130, err
    found = json.loads(out.strip().splitlines()[-1])
    (one,) = found["scores"]
    assert found["interrupted"] and one["interrupted"] and one["requests"] >= 8 and "goodput" not in err
    assert "Traceback" not in err and "tokens/s" in out


def test_it_is_in_the_api_and_needs_no_torch() -> None:
    assert api.bench_serve is bench_serve and alcoda.bench_serve is bench_serve
    code = "import sys, alcoda.serve.load.bench; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_of_our_own_server(server: Server, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = bench_serve(
        server.url,
        models=["tiny:fast", "tiny:exact"],
        rates=[10],
        duration_s=0.5,
        max_tokens=6,
        plot=tmp_path / "load.png",
        prompts=["What the engine reads,", "it reads"],
        ttft_ms=60_000,
        itl_ms=60_000,
    )
    fast, exact = found.scores
    for one in (fast, exact):
        assert one.errors == {} and one.good == one.completed == one.requests and one.output_tokens == 6 * one.requests
        assert one.tiers == {one.model.partition(":")[2]: one.requests}
    assert fast.mean_loops is not None and exact.mean_loops is not None and fast.mean_loops < exact.mean_loops
    assert (tmp_path / "load.png").stat().st_size > 1000

"""Drawing tokens: held against a slow reference, known numbers, and what a row may not depend on."""

from __future__ import annotations

import json
import math
import pickle
from collections import Counter
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from alcoda.config import validate
from alcoda.engine.sampling import NOT_FINITE, Drawn, Row, Sampling, draw, gumbel
from alcoda.errors import UsageError

GREEDY = Sampling()


def one(logits: Any, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), stream: int = 0, **how: Any) -> Drawn:
    (drawn,) = draw(torch.as_tensor(logits, dtype=torch.float64)[None], [Row(Sampling(**how), prompt, output, stream)])
    assert isinstance(drawn, Drawn), drawn
    return drawn


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    """Philox4x64-10 as its paper gives it."""
    (k0, k1), (x0, x1, x2, x3), mask = key, counter, 2**64 - 1
    for _ in range(10):
        a, b = x0 * 0xD2E7470EE14C6C93, x2 * 0xCA5A826395121157
        x0, x1, x2, x3 = (b >> 64) ^ x1 ^ k0, b & mask, (a >> 64) ^ x3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return [x0, x1, x2, x3]


def test_noise_is_what_it_is_said_to_be() -> None:
    # The first known answer of Random123, the authors' own code.
    assert [f"{word:016x}" for word in philox((0, 0), (0, 0, 0, 0))] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]
    for seed, stream, position in ((0, 0, 0), (5, 1, 7), (2**63 - 1, 2**40, 2**33)):
        words = [word for block in range(3) for word in philox((seed, stream), (1 + block, position, 0, 0))]
        expected = [-math.log(-math.log(((word >> 12) + 0.5) / 2**52)) for word in words]
        np.testing.assert_allclose(gumbel(seed, stream, position, 12), expected, rtol=1e-12)
        assert (gumbel(seed, stream, position, 10) == gumbel(seed, stream, position, 4096)[:10]).all()


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel(3, 0, position, 4096) for position in range(64)])
    assert np.isfinite(noise).all()
    # Mean: Euler's constant; variance: pi^2 / 6; within four standard errors.
    assert abs(noise.mean() - 0.5772156649) < 4 * math.pi / math.sqrt(6 * noise.size)
    assert abs(noise.var() - math.pi**2 / 6) < 4 * math.sqrt(4.4) * math.pi**2 / 6 / math.sqrt(noise.size)
    grid = np.linspace(-2, 6, 50)
    found = np.searchsorted(np.sort(noise), grid) / noise.size
    assert abs(found - np.exp(-np.exp(-grid))).max() < 1.95 / math.sqrt(noise.size)  # Kolmogorov-Smirnov, 0.1%


def slow_pick(logits_V: list[float], row: Row) -> int:
    """The module's docstring in plain Python, token by token."""
    s, n = row.sampling, len(logits_V)
    z = [x + s.logit_bias.get(v, 0.0) for v, x in enumerate(logits_V)]
    for v in range(n):
        if v in row.prompt or v in row.output:
            z[v] = z[v] / s.repetition_penalty if z[v] > 0 else z[v] * s.repetition_penalty
        times = list(row.output).count(v)
        z[v] -= s.frequency_penalty * times + (s.presence_penalty if times else 0.0)
    order = sorted(range(n), key=lambda v: (-z[v], v))
    if s.temperature == 0:
        return order[0]
    kept = order[: s.top_k]
    weight = {v: math.exp((z[v] - z[order[0]]) / s.temperature) for v in kept}
    total, so_far, nucleus = sum(weight.values()), 0.0, []
    for v in kept:
        nucleus.append(v)
        so_far += weight[v]
        if so_far / total >= s.top_p - 1e-12:
            break
    noise = gumbel(s.seed, row.stream, len(row.prompt) + len(row.output), n)
    kept = sorted(v for v in nucleus if weight[v] >= s.min_p * (1 - 1e-12))
    return max(kept, key=lambda v: (z[v] / s.temperature + noise[v], -v))


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.none() | st.integers(1, 9),
    # No sums of a few equal weights over a few: there, rounding says what is kept.
    top_p=st.sampled_from([1e-9, 0.317, 0.6181, 0.9073, 1.0]),
    min_p=st.sampled_from([0.0, 0.0517, 0.4531]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.9]),
    presence_penalty=st.sampled_from([0.0, -1.3, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    logit_bias=st.dictionaries(st.integers(0, 6), st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    logprobs=st.none() | st.integers(0, 8),
)
ids = st.lists(st.integers(0, 6), max_size=6)
rows_of_requests = st.builds(Row, samplings, ids, ids, st.integers(0, 3))
# Halves: ties are common, and a penalty of 0.5 makes more.
rows_of_logits = st.lists(st.integers(-6, 6).map(lambda x: x / 2), min_size=7, max_size=7)


@given(st.lists(st.tuples(rows_of_logits, rows_of_requests), min_size=1, max_size=5), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_rows_are_those_of_the_slow_reference(given_rows: list[tuple[list[float], Row]], padding: int) -> None:
    logits_NV = torch.tensor([logits for logits, _ in given_rows], dtype=torch.float64)
    padded_NV = torch.cat([logits_NV, torch.full((len(logits_NV), padding), 50.0)], 1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):  # halves are exact in all
        drawn = draw(padded_NV.to(dtype), [row for _, row in given_rows], n_vocab=7)
        for (logits, row), result in zip(given_rows, drawn, strict=True):
            assert isinstance(result, Drawn) and result.token == slow_pick(logits, row)
            check_logprobs(torch.tensor(logits, dtype=dtype), row.sampling.logprobs, result)


def check_logprobs(logits_V: Tensor, n: int | None, drawn: Drawn) -> None:
    if n is None:
        assert drawn.logprob is None and drawn.top == ()
        return
    exact_V = torch.log_softmax(logits_V if logits_V.dtype == torch.float64 else logits_V.float(), -1).tolist()
    assert drawn.logprob == exact_V[drawn.token]
    order = sorted(range(len(logits_V)), key=lambda v: (-float(logits_V[v]), v))
    assert drawn.top == tuple((v, exact_V[v]) for v in order[:n])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_is_argmax(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(16, 4096, generator=torch.Generator().manual_seed(0)).to(dtype)  # ties in 16 bits
    drawn = draw(logits_NV, [Row(GREEDY, [1], [])] * 16)
    assert drawn == [Drawn(token) for token in logits_NV.argmax(-1).tolist()]
    assert draw(torch.tensor([[1.0, 3, 3, 2, 3]]), [Row(GREEDY, [1], [])]) == [Drawn(1)]
    assert draw(logits_NV[:0], []) == []
    with pytest.raises(ValueError, match="15 rows"):
        draw(logits_NV, [Row(GREEDY, [1], [])] * 15)


def test_a_row_is_its_own() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_NV = torch.randn(12, 500, generator=generator) * 3
    kinds = [
        Sampling(temperature=0.9, top_p=0.9, seed=4, logprobs=3),
        GREEDY,
        Sampling(temperature=1.5, min_p=0.01, repetition_penalty=1.2, logit_bias={3: 2.0}),
        Sampling(logprobs=2, presence_penalty=1.0),
    ]
    rows = [Row(kinds[n % 4], list(range(n)), list(range(100, 100 + n))) for n in range(12)]
    together = draw(logits_NV, rows)
    alone = [draw(logits_NV[n : n + 1], [rows[n]])[0] for n in range(12)]
    assert together == alone
    backwards = draw(logits_NV.flip(0), rows[::-1])
    assert backwards == together[::-1]
    wide_NV = torch.cat([torch.zeros(12, 1), logits_NV], 1)[:, 1:]  # of another layout in memory
    assert draw(wide_NV, rows) == together
    torch.manual_seed(5)
    np.random.seed(5)
    assert draw(logits_NV, rows) == together


def test_noise_is_of_seed_stream_and_position() -> None:
    logits = torch.zeros(4096)
    how: dict[str, Any] = {"temperature": 1.0}
    token = one(logits, (1, 2), (3,), **how).token
    assert token == one(logits, (1,), (9, 9), **how).token  # the position is that of prompt and output together
    others = [
        one(logits, (1, 2), (3,), seed=1, **how),
        one(logits, (1, 2), (3,), stream=1, **how),
        one(logits, (1, 2), (3, 3), **how),
    ]
    assert len({token, *(other.token for other in others)}) == 4


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0, -math.inf], dtype=torch.float64)
    n = 4000

    def frequencies(**how: Any) -> list[float]:
        sampling = Sampling(seed=7, **how)
        rows = [Row(sampling, [0], [], stream) for stream in range(n)]
        counts = Counter(d.token for d in draw(logits_V.expand(n, -1), rows) if isinstance(d, Drawn))
        return [counts[v] / n for v in range(6)]

    def fits(found: list[float], expected: list[float]) -> bool:
        assert all((f == 0) for f, e in zip(found, expected, strict=True) if e == 0)
        chi2 = sum(n * (f - e) ** 2 / e for f, e in zip(found, expected, strict=True) if e)
        return chi2 < 18.5  # 4 degrees of freedom: 0.1%

    p_V = torch.softmax(logits_V / 0.7, -1)
    assert fits(frequencies(temperature=0.7), p_V.tolist())
    assert not fits(frequencies(temperature=0.85), p_V.tolist())
    top_V = p_V * torch.tensor([1, 1, 0, 0, 1, 0])
    assert fits(frequencies(temperature=0.7, top_k=3), (top_V / top_V.sum()).tolist())
    assert fits(frequencies(temperature=0.7, top_p=float(top_V.sum()) - 1e-6), (top_V / top_V.sum()).tolist())
    assert fits(frequencies(temperature=0.7, min_p=math.exp(-1 / 0.7) - 1e-6), (top_V / top_V.sum()).tolist())


def test_near_distributions_often_draw_the_same_token() -> None:
    generator = torch.Generator().manual_seed(3)
    logits_V = torch.randn(1000, generator=generator) * 2
    near_V = logits_V + 0.1 * torch.randn(1000, generator=generator)
    n, sampling = 300, Sampling(temperature=1.0)
    rows = [Row(sampling, [0] * (n + 1), [], stream=k) for k in range(n)]
    target = draw(logits_V.expand(n, -1), rows)
    agree = sum(a == b for a, b in zip(target, draw(near_V.expand(n, -1), rows), strict=True)) / n
    others = [row._replace(stream=row.stream + n) for row in rows]
    by_chance = sum(a == b for a, b in zip(target, draw(near_V.expand(n, -1), others), strict=True)) / n
    assert agree > 0.8 > 0.1 > by_chance


def test_penalties_by_hand() -> None:
    # Repetition: 4 / 2 = 2 (prompt), 3 / 2 = 1.5 (output), -1 * 2 = -2; 2.5 stays.
    assert one([4.0, 3.0, -1.0, 2.5], (0, 2), (1,), repetition_penalty=2.0).token == 3
    assert one([-1.0, -1.5], (0,), repetition_penalty=2.0).token == 1
    # Frequency: 3 - 2 * 0.6 = 1.8; presence: once, whatever the count; the prompt does not count.
    assert one([3.0, 1.9], (), (0, 0), frequency_penalty=0.6).token == 1
    assert one([3.0, 1.9], (0, 0, 0), (), frequency_penalty=2.0, presence_penalty=2.0).token == 0
    assert one([3.0, 1.9], (), (0, 0, 0), presence_penalty=1.0).token == 0
    assert one([3.0, 1.9], (), (0,), presence_penalty=1.2).token == 1
    assert one([3.0, 2.9], (), (1,), presence_penalty=-0.2).token == 1
    # Bias comes before the penalties: (-1 + 3) / 2 = 1 < 1.1.
    assert one([-1.0, 1.1], (0,), logit_bias={0: 3}, repetition_penalty=2.0).token == 1
    assert one([0.0, 50.0, 1.0], logit_bias={1: -100, 0: 1.5}).token == 0
    # The log-probability is the model's own all the same.
    drawn = one([0.0, 50.0], (1,), logit_bias={1: -100}, logprobs=1)
    assert drawn.token == 0 and drawn.logprob == pytest.approx(-50) and drawn.top == ((1, pytest.approx(0, abs=1e-9)),)
    # A prompt may hold ids that are only padding of the embedding.
    assert draw(torch.tensor([[1.0, 2.0, 9.0]]), [Row(Sampling(repetition_penalty=3.0), [1, 2], [])], 2) == [Drawn(0)]


def test_ties_at_the_edge_go_to_the_lowest_ids() -> None:
    for how in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.99}):
        assert {one(torch.zeros(4), stream=k, temperature=1.0, **how).token for k in range(50)} == {0, 1}
    assert {one(torch.zeros(4), stream=k, temperature=1.0, min_p=0.99).token for k in range(50)} == {0, 1, 2, 3}
    assert one([1.0, 2, 2], temperature=5.0, top_k=1).token == 1 == one([1.0, 2, 2], temperature=5.0, top_p=1e-9).token


def test_limits() -> None:
    logits = [1.0, 1.0 + 1e-12, -3.0]
    assert one(logits, temperature=5e-324).token == 1 == one(logits, temperature=1e-13).token
    assert {one(logits, stream=k, temperature=1e308).token for k in range(60)} == {0, 1, 2}
    assert one(logits, temperature=1.0, top_p=5e-324).token == 1
    assert one(logits, temperature=1e308, top_k=1).token == 1
    assert one(logits, temperature=1.0, top_k=10**30).token in (0, 1, 2)
    assert one(logits, temperature=1.0, min_p=math.nextafter(1, 0)).token in (0, 1)
    assert one([1e300, -1e300], (1,), repetition_penalty=1e300).token == 0
    (said,) = draw(torch.tensor([[1.0, 2.0]]), [Row(Sampling(repetition_penalty=5e-324), [1], [])])
    assert said == "repetition_penalty=5e-324 leaves no finite logit: take one nearer to 1"
    assert one([0.0, -math.inf, -math.inf], logprobs=3).top == ((0, 0.0),)
    assert all(one([0.0, -math.inf], stream=k, temperature=100.0).token == 0 for k in range(50))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_that_cannot_be_drawn_from(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits_NV[1, 7], logits_NV[2, 299], logits_NV[3] = math.nan, math.inf, -math.inf
    for sampling in (GREEDY, Sampling(temperature=1.0, top_p=0.9), Sampling(logprobs=4), Sampling(logit_bias={7: -9})):
        rows = [Row(sampling, [1], [])] * 5
        drawn = draw(logits_NV, rows)
        assert drawn[1:4] == [NOT_FINITE] * 3
        assert [drawn[0], drawn[4]] == draw(logits_NV[[0, 4]], rows[:2])
        assert all(isinstance(d, Drawn) for d in draw(logits_NV[2:3], rows[:1], n_vocab=299))  # ids that do not exist


def test_two_logits_of_one_logprob_are_told_apart() -> None:
    # In fp32 both log-probabilities round to one float; the likelier still comes first.
    logits_V = torch.zeros(20_000)
    logits_V[1] = 1e-7
    (drawn,) = draw(logits_V[None], [Row(Sampling(logprobs=2), [0], [])])
    assert isinstance(drawn, Drawn) and drawn.token == 1 and [token for token, _ in drawn.top] == [1, 0]
    assert drawn.logprob == drawn.top[0][1] == drawn.top[1][1]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -1, "temperature: a number, 0 (the likeliest token) or more (got -1)"),
        ("temperature", math.nan, "temperature: a number, 0 (the likeliest token) or more (got nan)"),
        ("temperature", math.inf, "(got inf)"),
        ("temperature", True, "(got True)"),
        ("temperature", "1", "(got '1')"),
        ("temperature", 10**400, "temperature: a number"),
        ("top_k", 0, "top_k: a whole number of at least 1 (got 0)"),
        ("top_k", 2.0, "top_k: a whole number of at least 1 (got 2.0)"),
        ("top_p", 0, "top_p: a number above 0, at most 1 (got 0)"),
        ("top_p", 1.01, "(got 1.01)"),
        ("min_p", 1, "min_p: a number from 0, below 1 (got 1)"),
        ("min_p", -0.1, "(got -0.1)"),
        ("repetition_penalty", 0, "repetition_penalty: a number above 0 (got 0)"),
        ("presence_penalty", 2.1, "presence_penalty: a number from -2 to 2 (got 2.1)"),
        ("frequency_penalty", -2.1, "frequency_penalty: a number from -2 to 2 (got -2.1)"),
        ("frequency_penalty", None, "(got None)"),
        ("seed", -1, "seed: a whole number from 0 to 2^63 - 1 (got -1)"),
        ("seed", 2**63, "(got 9223372036854775808)"),
        ("seed", 10**400, "seed: a whole number"),
        ("logprobs", 21, "logprobs: a whole number from 0 to 20 (got 21)"),
        ("logprobs", True, "(got True)"),
        ("logit_bias", {5: 101}, "logit_bias: token 5: a bias from -100 to 100, not 101"),
        ("logit_bias", {5: math.nan}, "not nan"),
        ("logit_bias", {5: "1"}, "not '1'"),
        ("logit_bias", {5: True}, "not True"),
        ("logit_bias", {-5: 1}, "logit_bias: the key -5 is no token id"),
        ("logit_bias", {"x": 1}, "'x' is no token id"),
        ("logit_bias", {True: 1}, "True is no token id"),
        ("logit_bias", {10**400: 1}, "is no token id"),
        ("logit_bias", {"9" * 5000: 1}, "is no token id"),
        ("logit_bias", {"1": 1, 1: 2}, "token 1 is named twice"),
        ("logit_bias", [1, 2], "logit_bias: a mapping of token ids to biases"),
        ("logit_bias", None, "logit_bias: a mapping"),
        ("topk", 5, "unknown key 'topk'; did you mean 'top_k'?"),
    ],
)
def test_what_cannot_be_asked_for(field: str, value: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(Sampling, {field: value})
    assert says in str(caught.value)


def test_sampling_cannot_be_changed() -> None:
    given_bias = {5: 1.5}
    sampling = Sampling(logit_bias=given_bias, top_k=7)
    given_bias[5] = 9.0
    assert sampling.logit_bias == {5: 1.5} and dict(sampling.logit_bias) == {5: 1.5}
    with pytest.raises(TypeError):
        sampling.logit_bias[5] = 2.0  # type: ignore[index]
    for same in (
        deepcopy(sampling),
        pickle.loads(pickle.dumps(sampling)),
        validate(Sampling, json.loads(sampling.model_dump_json())),
        sampling.model_copy(update={"seed": 0}),
    ):
        assert same == sampling and hash(same) == hash(sampling)
    assert sampling != Sampling(logit_bias={5: 1.0}, top_k=7)
    assert Sampling(logit_bias={"50256": -100}).logit_bias == {50256: -100.0}  # as JSON has it
    assert "{5: 1.5}" in repr(sampling)


def test_biases_of_tokens_that_there_are() -> None:
    Sampling(logit_bias={256: 1.0}, top_k=10**6).check(257)
    with pytest.raises(UsageError, match="logit_bias: there is no token 257: the ids are 0 to 256"):
        Sampling(logit_bias={257: 1.0}).check(257)

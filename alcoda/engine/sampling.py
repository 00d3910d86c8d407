"""How the next token is drawn from a model's logits: `Sampling` says how, `draw` does it for a batch of rows.

Of each row, in this order:

1. bias: ``logit_bias`` is added.
2. penalties: repetition (CTRL, section 4.1, in the form that also lowers negative logits: a positive one is divided, a
   negative one multiplied), of tokens in prompt or output; then frequency and presence (OpenAI's: so much off for each
   time, and so much once), of tokens in the output.
3. temperature: differences of logits are divided by it. At 0 the largest logit is the token and nothing below is done.
4. top_k: the k likeliest stay.
5. top_p: of these, renormalised, the fewest likeliest whose probabilities sum to ``top_p`` or more stay.
6. min_p: of these, those at least ``min_p`` times as likely as the likeliest stay.
7. noise: the token is the argmax of logit / temperature + g, g_V standard Gumbel noise (`gumbel`), which draws from the
   softmax of what stays (Gumbel-max; Maddison, Tarlow and Minka 2014, section 2).

The likeliest token always stays, and of tokens with equal logits the lower id goes first everywhere, so that one logit
more or less at the edge is no matter of chance. Adjusted logits are fp64 whatever the model's are.

A row's result is a function of its logits, its `Sampling`, its prompt and output, and its stream: the rows beside it,
the order of calls and what was drawn before do not enter. So text with a seed is the same at any batching. The noise
belongs to a position and not to a call, so a draft whose logits are near the model's often draws the model's token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator
from pydantic_core import PydanticCustomError
from torch import Tensor

from alcoda.config import Config
from alcoda.errors import UsageError

NOT_FINITE = "the model's logits are not finite: its weights are damaged, or training diverged"
MAX_BIAS = 100
MAX_LOGPROBS = 20


def _number(kind: type | tuple[type, ...], allowed: str, fits: Callable[[Any], bool]) -> BeforeValidator:
    """A number of ``kind`` that ``fits``; if not, the error says what is ``allowed``."""

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, kind) or not _is_finite(value) or not fits(value):
            raise PydanticCustomError("range", "{allowed}", {"allowed": allowed})
        return value

    return BeforeValidator(check)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float; a field of whole numbers has its own limits
        return False


class TokenBias(Mapping[int, float]):
    """Token id -> what is added to its logit. Nothing can change it, so a `Sampling` can be shared and hashed."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(frozenset(self._bias.items()))

    def __repr__(self) -> str:
        return repr(self._bias)


def _token_bias(value: Any) -> TokenBias:
    if isinstance(value, TokenBias):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError("range", "a mapping of token ids to biases from -100 to 100 is needed")
    found: dict[int, float] = {}
    for key, bias in value.items():
        # In JSON every key is a string. 19 digits hold 2^63 - 1.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 1 << 63:
            text = f"the key {key!r:.60} is no token id: a whole number from 0"
            raise PydanticCustomError("range", "{text}", {"text": text})
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
            text = f"token {token}: a bias from -{MAX_BIAS} to {MAX_BIAS}, not {bias!r}"
            raise PydanticCustomError("range", "{text}", {"text": text})
        if token in found:
            text = f"token {token} is named twice"
            raise PydanticCustomError("range", "{text}", {"text": text})
        found[token] = float(bias)
    return TokenBias(found)


_REAL = (int, float)
_Penalty = Annotated[float, _number(_REAL, "a number from -2 to 2", lambda x: -2 <= x <= 2)]
_Logprobs = Annotated[int, _number(int, f"a whole number from 0 to {MAX_LOGPROBS}", lambda n: 0 <= n <= MAX_LOGPROBS)]


class Sampling(Config):
    """How tokens are drawn. As it stands: the likeliest token each time."""

    temperature: Annotated[float, _number(_REAL, "a number, 0 (the likeliest token) or more", lambda x: x >= 0)] = 0.0
    """Logits are divided by it; 0: the likeliest token, of equals the lowest id."""
    top_k: Annotated[int, _number(int, "a whole number of at least 1", lambda k: k >= 1)] | None = None
    """Draw among so many likeliest tokens; more than there are: among all."""
    top_p: Annotated[float, _number(_REAL, "a number above 0, at most 1", lambda p: 0 < p <= 1)] = 1.0
    """Draw among the fewest likeliest tokens whose probabilities sum to this."""
    min_p: Annotated[float, _number(_REAL, "a number from 0, below 1", lambda p: 0 <= p < 1)] = 0.0
    """Draw among tokens at least so many times as likely as the likeliest."""
    repetition_penalty: Annotated[float, _number(_REAL, "a number above 0", lambda x: x > 0)] = 1.0
    """Of tokens in prompt or output: positive logits are divided by it, negative ones multiplied."""
    presence_penalty: _Penalty = 0.0
    """Off the logit of each token in the output."""
    frequency_penalty: _Penalty = 0.0
    """Off the logit of each token in the output, for each time that it is there."""
    logit_bias: Annotated[Mapping[int, float], PlainValidator(_token_bias), PlainSerializer(dict)] = Field(
        default_factory=dict
    )
    """Token id -> what is added to its logit, -100 to 100."""
    seed: Annotated[int, _number(int, "a whole number from 0 to 2^63 - 1", lambda n: 0 <= n < 1 << 63)] = 0
    """Of the noise."""
    logprobs: _Logprobs | None = None
    """How many likeliest tokens are reported beside the one drawn; None: no log-probability at all."""

    def check(self, n_vocab: int) -> None:
        """UsageError where a bias is of a token that a vocabulary of ``n_vocab`` does not have."""
        for token in self.logit_bias:
            if token >= n_vocab:
                raise UsageError(f"logit_bias: there is no token {token}: the ids are 0 to {n_vocab - 1}")

    @property
    def adjusts(self) -> bool:
        """Whether a bias or a penalty changes logits."""
        return bool(
            self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or len(self.logit_bias)
        )

    @property
    def is_plain(self) -> bool:
        """Whether the argmax of the model's logits is all that is asked for."""
        return self.temperature == 0 and self.logprobs is None and not self.adjusts


GREEDY = Sampling()
"""The likeliest token each time."""


class Drawn(NamedTuple):
    """A token that was drawn.

    Log-probabilities are of the model's own distribution: log_softmax of its logits as they come (over the ids that
    exist), in fp32, or fp64 where the logits are, before bias, penalties and temperature.
    """

    token: int
    logprob: float | None = None
    """Of ``token``; None where none was asked for. Where ``token`` is in ``top``, the same float as there."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (id, log-probability), likeliest first, of equals the lowest id; none of probability 0."""


class Row(NamedTuple):
    """Whose next token a row of logits is for."""

    sampling: Sampling
    prompt: Sequence[int]
    output: Sequence[int]
    """Tokens drawn so far."""
    stream: int = 0
    """Which of the completions of one request: another stream, another noise."""


def draw(logits_NV: Tensor, rows: Sequence[Row], n_vocab: int | None = None) -> list[Drawn | str]:
    """The next token of each row.

    Args:
        logits_NV: the model's, of any float type, on any device.
        rows: N of them.
        n_vocab: ids below it exist (an embedding may be padded); None: all V. Others are never drawn or reported.

    Returns:
        For each row what was drawn, or a text that says why nothing can be drawn from it: a logit is NaN or +inf, or
        all are -inf (a single -inf is a token of probability 0), or penalties leave no finite logit.
    """
    if len(rows) != logits_NV.shape[0]:
        raise ValueError(f"{len(rows)} rows for logits of shape {tuple(logits_NV.shape)}")
    logits_NV = logits_NV.detach()[:, :n_vocab]
    tokens_N, logits_N = _best(logits_NV)
    # The largest logit tells of all: NaN and +inf are the largest where there is one, -inf only where all are.
    drawn: list[Drawn | str] = [
        Drawn(token) if math.isfinite(logit) else NOT_FINITE for token, logit in zip(tokens_N, logits_N, strict=True)
    ]
    todo = [n for n, row in enumerate(rows) if not row.sampling.is_plain and isinstance(drawn[n], Drawn)]
    if todo:
        for n, logits_V in zip(todo, _numpy(logits_NV[todo]), strict=True):
            drawn[n] = _draw(logits_V, rows[n], tokens_N[n])
    return drawn


def gumbel(seed: int, stream: int, position: int, n: int) -> np.ndarray:
    """Standard Gumbel noise of the first ``n`` ids, fp64: a function of its arguments, the same on every machine.

    Of id v it is -log(-log(u)), u = (floor(w / 2^12) + 1/2) / 2^52, w the 64-bit word v mod 4 of Philox4x64-10 (Salmon
    et al. 2011) with key (seed, stream) at counter (1 + floor(v / 4), position, 0, 0), lowest word first. So u is never
    0 or 1, and the noise of an id does not depend on how many there are. (Equal on every machine: u to the bit; the
    logarithms to their rounding.)
    """
    bits = np.random.Philox(
        key=np.array([seed, stream], np.uint64), counter=np.array([0, position, 0, 0], np.uint64)
    ).random_raw(n)
    u_V = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(u_V))


def logprobs(logits_V: np.ndarray, token: int, n: int) -> Drawn:
    """``token`` with its log-probability and the ``n`` likeliest, of a model's logits in fp32 or fp64."""
    logprobs_V = torch.log_softmax(torch.from_numpy(logits_V), -1).numpy()
    top: tuple[tuple[int, float], ...] = ()
    if n:
        # By logit, because two of them may round to one log-probability: the argmax then still comes first.
        ids_K = _largest(logits_V, n)
        ids_K = ids_K[np.argsort(-logits_V[ids_K], kind="stable")]
        top = tuple((k, x) for k, x in zip(ids_K.tolist(), logprobs_V[ids_K].tolist(), strict=True) if x > -math.inf)
    return Drawn(token, float(logprobs_V[token]), top)


def _draw(logits_V: np.ndarray, row: Row, best: int) -> Drawn | str:
    """From finite logits, in fp32 or fp64, whose argmax is ``best``."""
    sampling = row.sampling
    token = best
    if sampling.adjusts or sampling.temperature > 0:
        with np.errstate(over="ignore"):  # beyond fp64 is -inf: never drawn
            adjusted_V = logits_V.astype(np.float64)
            if sampling.adjusts:
                _adjust(adjusted_V, row)
            token = int(adjusted_V.argmax())
            if not math.isfinite(adjusted_V[token]):
                return f"repetition_penalty={sampling.repetition_penalty} leaves no finite logit: take one nearer to 1"
            if sampling.temperature > 0:
                token = _sample(adjusted_V, row)
    return Drawn(token) if sampling.logprobs is None else logprobs(logits_V, token, sampling.logprobs)


def _adjust(logits_V: np.ndarray, row: Row) -> None:
    """Bias and penalties, in place."""
    sampling, n = row.sampling, len(logits_V)
    for token, bias in sampling.logit_bias.items():
        if token < n:
            logits_V[token] += bias
    counts_V = _counts(row.output, n)
    if sampling.repetition_penalty != 1:
        ids_M = np.flatnonzero(counts_V + _counts(row.prompt, n))
        logits_M = logits_V[ids_M]
        penalty = sampling.repetition_penalty
        logits_V[ids_M] = np.where(logits_M > 0, logits_M / penalty, logits_M * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * (counts_V > 0)


def _counts(ids: Sequence[int], n: int) -> np.ndarray:
    """How often each of the first ``n`` ids is there; a prompt may hold others, which have no logit here."""
    ids_T = np.asarray(ids, np.int64)
    return np.bincount(ids_T[(ids_T >= 0) & (ids_T < n)], minlength=n)


def _sample(logits_V: np.ndarray, row: Row) -> int:
    """From adjusted logits in fp64, at a temperature above 0."""
    sampling = row.sampling
    noise_V = gumbel(sampling.seed, row.stream, len(row.prompt) + len(row.output), len(logits_V))
    ids_K, logits_K = None, logits_V
    if sampling.top_k is not None and sampling.top_k < len(logits_V):
        ids_K = _largest(logits_V, sampling.top_k)
        logits_K = logits_V[ids_K]
    if sampling.top_p < 1:
        sorted_K = np.sort(logits_K)[::-1]
        mass_K = np.cumsum(np.exp((sorted_K - sorted_K[0]) / sampling.temperature))
        n = int(np.searchsorted(mass_K, sampling.top_p * mass_K[-1])) + 1
        kept_K = _largest(logits_K, n, sorted_K[n - 1])
        ids_K, logits_K = kept_K if ids_K is None else ids_K[kept_K], logits_K[kept_K]
    scaled_K = (logits_K - logits_K.max()) / sampling.temperature
    if sampling.min_p > 0:
        kept_K = np.flatnonzero(scaled_K >= math.log(sampling.min_p))
        ids_K, scaled_K = kept_K if ids_K is None else ids_K[kept_K], scaled_K[kept_K]
    if ids_K is None:
        return int((scaled_K + noise_V).argmax())
    return int(ids_K[(scaled_K + noise_V[ids_K]).argmax()])


def _largest(x_V: np.ndarray, n: int, floor: float | None = None) -> np.ndarray:
    """Where the ``n`` largest are, in ascending order; of equals the first ones. ``floor``: the smallest, if known."""
    if n >= len(x_V):
        return np.arange(len(x_V))
    floor = np.partition(x_V, -n)[-n] if floor is None else floor
    kept_V = x_V > floor
    kept_V[np.flatnonzero(x_V == floor)[: n - np.count_nonzero(kept_V)]] = True
    return np.flatnonzero(kept_V)


def _best(logits_NV: Tensor) -> tuple[list[int], list[float]]:
    """The argmax of each row, the first of equals, and its logit; NaN where there is one."""
    if logits_NV.is_cpu:
        array_NV = _numpy(logits_NV)  # on a CPU its argmax is much faster than torch's
        tokens_N = array_NV.argmax(-1)
        return tokens_N.tolist(), array_NV[np.arange(len(tokens_N)), tokens_N].tolist()
    best = logits_NV.max(-1)
    return best.indices.tolist(), best.values.tolist()


def _numpy(logits_NV: Tensor) -> np.ndarray:
    """In fp32, or fp64 where they are."""
    return (logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()).cpu().numpy()

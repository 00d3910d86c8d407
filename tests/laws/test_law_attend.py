"""Law 5: the attention kernels equal their naive reference, in outputs and gradients, at awkward sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from space import GRT, house
from torch import Tensor

from alcoda.laws.attend import check_kernels
from alcoda.laws.law import close
from alcoda.laws.subject import make
from alcoda.model import attention
from alcoda.model.attention import EXPLICIT_MAX_TOKENS, attend, attend_naive, attend_padded
from alcoda.model.keys import RowKeys, RowsView, View

Attend = Callable[[Tensor, Tensor, Tensor, View], Tensor]

H, K = 4, 8
EXACT = 1e-10
BF16 = 2**-5
"""bf16 keeps 8 bits: a rounding is 2^-9 relative. Queries, scores, weights and sums are each rounded, so 16 of them."""

groups = pytest.mark.parametrize("group", [1, 2, 4])


def draw(n_queries: int, n_keys: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, transposed from [B, T, H, K] as the model's are."""
    sizes = [(n_queries, H), (n_keys, H // group), (n_keys, H // group)]
    return tuple(torch.randn(2, n, heads, K, dtype=torch.float64).to(dtype).transpose(1, 2) for n, heads in sizes)


def masked(mask: Tensor | None) -> View:
    """A view that is nothing but its mask: attention reads no positions."""
    none = torch.empty(0)
    return View(none, none, None, mask, False)


def outputs_and_grads(f: Attend, qkv: tuple[Tensor, ...], view: View) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    y = f(*leaves, view)
    weight = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, weight)]


def check(fast: Attend, qkv: tuple[Tensor, ...], view: View) -> None:
    dtype = qkv[0].dtype
    exact = tuple(x.double() for x in qkv)
    actual = outputs_and_grads(fast, qkv, view)
    expected = outputs_and_grads(attend_naive, exact, view)
    with torch.no_grad():
        actual.append(fast(*qkv, view))  # inference may take another kernel
    expected.append(expected[0])
    names = ("output", "gradient of q", "gradient of k", "gradient of v", "output without gradients")
    for name, a, b in zip(names, actual, expected, strict=True):
        bound = EXACT if dtype == torch.float64 else BF16 * max(1.0, b.abs().max().item())
        close(a.double(), b, bound, name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@groups
@pytest.mark.parametrize("n_tokens", [1, 5, 63, 100, EXPLICIT_MAX_TOKENS + 1])
def test_causal_attention(n_tokens: int, group: int, dtype: torch.dtype) -> None:
    check(attend, draw(n_tokens, n_tokens, group, dtype), View.causal(torch.arange(n_tokens)))


def test_training_on_a_cpu_takes_the_explicit_kernel_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(*qkv: Tensor) -> Tensor:
        calls.append(qkv[0].size(2))
        return explicit(*qkv)

    explicit = attention._attend_explicit
    monkeypatch.setattr(attention, "_attend_explicit", spy)
    for n_tokens in (5, EXPLICIT_MAX_TOKENS, EXPLICIT_MAX_TOKENS + 1):
        qkv, view = draw(n_tokens, n_tokens, 1, torch.float32), View.causal(torch.arange(n_tokens))
        attend(*qkv, view)
        attend(*(x.requires_grad_() for x in qkv), view)
    assert calls == [5, EXPLICIT_MAX_TOKENS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@groups
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 63), (5, 12), (63, 100), (7, 5)])
def test_masked_attention(n_queries: int, n_keys: int, group: int, dtype: torch.dtype) -> None:
    """A random mask a row of the batch, in which some queries see nothing."""
    mask = torch.rand(2, 1, n_queries, n_keys) < 0.5
    mask[0, :, n_queries // 2] = False
    assert not mask.any(-1).all()
    check(attend, draw(n_queries, n_keys, group, dtype), masked(mask))


@groups
@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 1), (1, 63), (5, 12)])
def test_attention_to_all(n_queries: int, n_keys: int, group: int) -> None:
    """The view of a decoding step: no mask, not causal."""
    check(attend, draw(n_queries, n_keys, group, torch.float64), masked(None))


# -- windows ----------------------------------------------------------------------------------------------------------


def by_hand(pos_BT: Tensor, key_pos_BS: Tensor, live_BS: Tensor, window: int) -> View:
    """The rule itself, key by key: live, not after the query, and one of the last ``window`` positions."""
    seen = [
        [[live and t - window < s <= t for s, live in zip(keys, lives, strict=True)] for t in queries]
        for queries, keys, lives in zip(pos_BT.tolist(), key_pos_BS.tolist(), live_BS.tolist(), strict=True)
    ]
    return masked(torch.tensor(seen)[:, None])


def check_window(view: View, window: int, by_hand_window: int, n_queries: int, n_keys: int, group: int) -> None:
    """Attention through ``view.within(window)`` is naive attention through the rule written out."""
    key_pos_BS = view.key_pos.expand(2, n_keys)
    live_BS = torch.ones(2, n_keys, dtype=torch.bool) if view.key_live is None else view.key_live
    truth = by_hand(view.pos.expand(2, n_queries), key_pos_BS, live_BS, by_hand_window)

    def windowed(q: Tensor, k: Tensor, v: Tensor, given: View) -> Tensor:
        return attend(q, k, v, view.within(window) if given is truth else given)

    check(windowed, draw(n_queries, n_keys, group, torch.float64), truth)


def left_padded(n_tokens: int, n_padding: int) -> View:
    """Two rows of which the second begins with padding, which stands at position 0."""
    place = torch.arange(n_tokens)
    pos_BT = torch.stack([place, (place - n_padding).clamp(min=0)])
    return View.tagged(pos_BT, pos_BT, torch.stack([place >= 0, place >= n_padding]))


N = 13
VIEWS = {
    "a-pass": (View.causal(torch.arange(N)), N, N),
    "one-token": (View.causal(torch.arange(1)), 1, 1),
    "decoding": (View(torch.tensor([N - 1]), torch.arange(N), None, None, False), 1, N),
    "a-chunk": (
        View(torch.arange(N - 4, N), torch.arange(N), None, torch.arange(N) <= torch.arange(N - 4, N)[:, None], False),
        4,
        N,
    ),
    "left-padded": (left_padded(N, 5), N, N),
    "gaps": (View.tagged(*[torch.tensor([[0, 9, 50, 51], [3, 4, 5, 90]])] * 2, None), 4, 4),
    "in-no-order": (View.tagged(*[torch.stack([torch.arange(N - 1, -1, -1), torch.arange(N)])] * 2, None), N, N),
}


@groups
@pytest.mark.parametrize("window", [1, 2, 5, N - 1, N, N + 1, 10 * N])
@pytest.mark.parametrize(("view", "n_queries", "n_keys"), VIEWS.values(), ids=VIEWS)
def test_attention_through_a_window(view: View, n_queries: int, n_keys: int, window: int, group: int) -> None:
    check_window(view, window, window, n_queries, n_keys, group)


@pytest.mark.parametrize("wrong", [4, 6])
@pytest.mark.parametrize("name", ["a-pass", "decoding", "a-chunk", "left-padded", "in-no-order"])
def test_control_a_window_off_by_one_is_noticed(name: str, wrong: int) -> None:
    view, n_queries, n_keys = VIEWS[name]
    with pytest.raises(AssertionError, match="output"):
        check_window(view, 5, wrong, n_queries, n_keys, 1)


def test_a_window_that_hides_nothing_keeps_the_causal_kernel() -> None:
    view = View.causal(torch.arange(N))
    assert view.within(N) is view
    assert not view.within(N - 1).is_causal


def test_a_query_that_sees_nothing_reads_zero() -> None:
    mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    mask[..., 1, :] = False
    for f in (attend, attend_naive):
        y = f(*(x[:1] for x in draw(3, 4, 1, torch.float64)), masked(mask))
        assert not y[:, :, 1].any()
        assert y[:, :, [0, 2]].all()


def one_key_less(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    """A planted fault: of many keys, the first is lost."""
    mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    mask[1:, 0] = False
    return attend(q, k, v, masked(mask))


def interleaved_groups(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    """A planted fault: query head h reads key head h mod G."""
    return attend(q, k.repeat(1, H // k.size(1), 1, 1), v.repeat(1, H // v.size(1), 1, 1), view)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("fault", [one_key_less, interleaved_groups])
def test_control_a_wrong_kernel_is_noticed(fault: Attend, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="output"):
        check(fault, draw(63, 63, 2, dtype), View.causal(torch.arange(63)))


def test_control_a_wrong_gradient_is_noticed() -> None:
    def detaches(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return attend(q, k + (k * 1e-6 - (k * 1e-6).detach()), v, view)

    with pytest.raises(AssertionError, match="gradient of k"):
        check(detaches, draw(63, 63, 1, torch.float64), View.causal(torch.arange(63)))


def test_the_kernels_of_a_whole_model() -> None:
    check_kernels(make(house(**GRT)), 3)


@pytest.mark.parametrize("trains", [False, True], ids=["infers", "trains"])
def test_control_a_wrong_kernel_in_a_model_is_noticed(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return attend(q, k, v, view) * (1 + 1e-6 * (torch.is_grad_enabled() is trains))

    monkeypatch.setattr(attention, "attend", wrong)
    with pytest.raises(AssertionError, match="in training" if trains else "at evaluation"):
        check_kernels(make(house(**GRT)), 3)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_several_lengths(heads: tuple[int, int], window: int | None) -> None:
    """One token of each text over its own keys: row by row, in one padded call, and the naive way."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lengths, width = (1, 7, 4), 8
    q_WH1K = drawn(len(lengths), heads[0], 1, width)
    keys = RowKeys([drawn(1, heads[1], n, width) for n in lengths], [drawn(1, heads[1], n, width) for n in lengths])
    pos_W1 = torch.tensor([[n - 1] for n in lengths])
    rows_WH1K = attend(q_WH1K, *keys, RowsView(pos_W1, window))
    seen = slice(None if window is None else -window, None)
    padded_WH1K = attend_padded(q_WH1K, *([x[:, :, seen] for x in rows] for rows in keys))
    for i, n in enumerate(lengths):
        view = View(pos_W1[i], torch.arange(n), None, None, False)
        view = view if window is None else view.within(window)
        naive = attend_naive(q_WH1K[i : i + 1], keys.k[i], keys.v[i], view)
        assert torch.allclose(rows_WH1K[i : i + 1], naive, rtol=0, atol=1e-12)
        assert torch.allclose(padded_WH1K[i : i + 1], naive, rtol=0, atol=1e-12)
        assert n == 1 or not torch.allclose(naive, keys.v[i][:, :, -1:].repeat_interleave(heads[0] // heads[1], 1))

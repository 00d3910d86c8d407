"""Law 2: one pass with keys kept is the full pass, however the tokens are cut, padded, batched or written again."""

from __future__ import annotations

import pytest
import torch
from space import GRT, cases, house, over_space
from torch import Tensor

from alcoda.laws.decode import (
    T,
    check_batch_mates,
    check_cached,
    check_idle_row,
    check_left_padded,
    check_one_depth,
    check_order,
    check_readouts,
    check_row_of_padding,
    check_written_again,
    left_padded,
)
from alcoda.laws.law import LawBroken, close
from alcoda.laws.subject import EXACT, at_most, depths, is_causal, make, tokens
from alcoda.model import attention
from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore, Slot, View


def decodes(config: ModelConfig) -> bool:
    return is_causal(config, trains=False)


both_depths = pytest.mark.parametrize("n_loops", [1, 3])
DESIGNS = [case for case in cases() if decodes(case.config)]
over_depths = pytest.mark.parametrize(
    ("config", "n_loops"),
    [pytest.param(case.config, 3, id=f"{case.name}-3") for case in DESIGNS]
    + [pytest.param(case.config, 1, id=f"{case.name}-1") for case in DESIGNS[::3]],
)
"""Every design at three loops; some at one, which three begin with: of rows, the depth decides nothing more."""


@pytest.fixture(autouse=True)
def inference() -> None:
    """Keys are kept in place, without gradients."""
    with torch.no_grad():
        yield


@both_depths
@over_space(decodes)
def test_prefill_and_decode_equal_the_full_pass(config: ModelConfig, n_loops: int) -> None:
    check_cached(make(config), at_most(config, n_loops))


def test_control_a_store_that_loses_keys_is_noticed() -> None:
    class Amnesiac(KeyStore):
        def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
            k, v = super().write(slot, k_BGTK, v_BGTK)
            return k, v.index_fill(2, torch.tensor([0]), 0.0)

    with pytest.raises(AssertionError, match="decoding"):
        check_cached(make(house(**GRT)), 3, Amnesiac)


def test_control_loops_that_share_slots_are_noticed() -> None:
    class OneSlot(KeyStore):
        """The last loop's keys for all loops: what a cache keyed by (stage, layer) would do."""

        def write(self, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, Tensor]:
            slot = (*slot[:2], 0)
            self._written[slot] = self._start
            return super().write(slot, k_BGTK, v_BGTK)

    check_cached(make(house(**GRT)), 1, OneSlot)
    with pytest.raises(AssertionError, match="decoding"):
        check_cached(make(house(**GRT)), 3, OneSlot)


def test_control_a_store_that_miscounts_positions_is_noticed() -> None:
    class OffByOne(KeyStore):
        def open(self, *args, **kwargs) -> View:
            start, view = self.n_tokens, super().open(*args, **kwargs)
            return view._replace(pos=view.pos + 1) if start else view

    with pytest.raises(AssertionError, match="decoding"):
        check_cached(make(house(**GRT)), 1, OffByOne)


# -- left padding -----------------------------------------------------------------------------------------------------


@over_depths
def test_left_padded_rows_equal_rows_alone(config: ModelConfig, n_loops: int) -> None:
    check_left_padded(make(config), at_most(config, n_loops))


def test_control_padding_that_is_seen_is_noticed() -> None:
    with pytest.raises(AssertionError, match="left-padded"):
        check_left_padded(make(house(**GRT)), 3, hides_padding=False)


def test_control_padding_that_shifts_learned_positions_is_noticed() -> None:
    with pytest.raises(AssertionError, match="left-padded"):
        check_left_padded(make(house(position="learned")), 1, tells_pos=False)


def test_rotary_positions_are_relative() -> None:
    check_left_padded(make(house(position="rope")), 3, tells_pos=False)


@over_depths
def test_a_row_may_idle_while_another_goes_on(config: ModelConfig, n_loops: int) -> None:
    check_idle_row(make(config), at_most(config, n_loops))


def test_control_an_idle_row_whose_padding_replaces_its_key_is_noticed() -> None:
    class PaddingIsText(KeyStore):
        def open(self, n_tokens: int, n_loops: int, pos_BT: Tensor | None, live_BT: Tensor | None, device) -> View:
            return super().open(n_tokens, n_loops, pos_BT, None, device)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LawBroken, match="after it idled") as broken:
        patch.setattr("alcoda.laws.decode.KeyStore", PaddingIsText)
        check_idle_row(make(house(**GRT)), 3)
    assert broken.value.positions == ((1, 3),)


@over_space(decodes)
def test_a_row_of_nothing_but_padding_spoils_no_other(config: ModelConfig) -> None:
    check_row_of_padding(make(config), at_most(config, 3))


def test_control_a_row_of_padding_that_is_not_a_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend

    def nothing_seen_is_nan(q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        y = attend(q, k, v, view)
        return y if view.mask is None else y.masked_fill(~view.mask.any(-1, keepdim=True), float("nan"))

    monkeypatch.setattr(attention, "attend", nothing_seen_is_nan)
    with pytest.raises(LawBroken, match="not a number") as broken:
        check_row_of_padding(make(house(**GRT)), 3)
    assert broken.value.positions == tuple((1, t) for t in range(5))


# -- batch-mates ------------------------------------------------------------------------------------------------------


@over_depths
def test_batch_mates_change_nothing(config: ModelConfig, n_loops: int) -> None:
    check_batch_mates(make(config), at_most(config, n_loops))


def test_control_rows_that_mix_are_noticed() -> None:
    model = make(house(**GRT))
    model.update.register_forward_hook(lambda module, args, out: out + 1e-12 * out.mean(0))
    with pytest.raises(AssertionError, match="batch-mates"):
        check_batch_mates(model, 3)


# -- writing again ----------------------------------------------------------------------------------------------------


@over_depths
def test_a_token_written_again_replaces_its_key(config: ModelConfig, n_loops: int) -> None:
    check_written_again(make(config), at_most(config, n_loops))


class Hoarder(KeyStore):
    """A store that forgets to retire the old key of a token that is written again."""

    def open(self, *args, **kwargs) -> View:
        view = super().open(*args, **kwargs)
        if self.pos_BS is None:
            return view
        self.live_BS = torch.ones_like(self.live_BS)
        return View.tagged(view.pos, self.pos_BS, self.live_BS)


def test_control_a_store_that_does_not_retire_is_noticed() -> None:
    check_cached(make(house(**GRT)), 3, Hoarder)
    with pytest.raises(AssertionError, match="written again"):
        check_written_again(make(house(**GRT)), 3, Hoarder)


def test_the_first_token_of_a_left_padded_row_can_be_written_again() -> None:
    """Padding stands at position 0, as the first token does: the token's key is retired, and padding stays unseen."""
    model = make(house(**GRT))
    old = [tokens(1, 6, seed=1)[0], tokens(1, 3, seed=2)[0]]
    new = [row.clone() for row in old]
    for row in new:
        row[0] = (row[0] + 1) % 64
    store = KeyStore()
    ids_BT, pos_BT, live_BT = left_padded(old)
    model(ids_BT, 3, pos_BT=pos_BT, live_BT=live_BT, store=store)
    assert store.live_BS.sum(1).tolist() == [6, 3]
    n_again = 3  # of the short row all, of the long row the first three: the rest of it stands after the new keys
    again = model(
        torch.stack([row[:n_again] for row in new]), 3, pos_BT=torch.arange(n_again).expand(2, -1), store=store
    )
    for row in range(2):
        close(again[row], model(new[row][None], 3)[0, :n_again], EXACT, f"row {row}")
    assert store.live_BS.sum(1).tolist() == [6, 3]


@over_space(decodes)
def test_the_order_of_tagged_tokens_does_not_matter(config: ModelConfig) -> None:
    check_order(make(config), at_most(config, 3))


def test_control_a_model_that_reads_its_tokens_where_they_lie_is_noticed() -> None:
    model = make(house(**GRT))
    model.update.register_forward_hook(lambda module, args, out: out + 1e-6 * torch.arange(T)[:, None])
    with pytest.raises(LawBroken, match="shuffled"):
        check_order(model, 3)


# -- one store, one depth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1)], ids=["deeper", "shallower"])
@over_space(decodes)
def test_a_store_refuses_another_depth(config: ModelConfig, first: int, then: int) -> None:
    check_one_depth(make(config), at_most(config, first), at_most(config, then))


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1)], ids=["deeper", "shallower"])
def test_control_a_store_that_takes_any_depth_is_noticed(first: int, then: int) -> None:
    class Lenient(KeyStore):
        def open(self, *args, **kwargs) -> View:
            self.n_loops = None
            for loop in range(3):
                for slot in (("core", 0, loop), ("core", 1, loop), ("coda", 0, loop)):
                    self._written[slot] = self.n_tokens
            return super().open(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LawBroken, match=f"{first} loops takes {then} loops"):
        patch.setattr("alcoda.laws.decode.KeyStore", Lenient)
        check_one_depth(make(house(**GRT)), first, then)


def test_a_store_serves_one_readout() -> None:
    with pytest.raises(ValueError, match="a store serves one depth"):
        next(make(house()).readouts(tokens(1, T), [1, 3], store=KeyStore()))


@pytest.mark.parametrize("loops", [[], [0], [2, 1], [1, 1]])
def test_readouts_need_increasing_depths(loops: list[int]) -> None:
    with pytest.raises(ValueError, match="must be increasing and at least 1"):
        next(make(house()).readouts(tokens(1, T), loops))


@over_space()
def test_readouts_of_one_run_equal_runs_of_their_own(config: ModelConfig) -> None:
    check_readouts(make(config), depths(config, (1, 2, 4)))


def test_control_readouts_that_change_the_run_are_noticed() -> None:
    model = make(house(**GRT))

    def spoils_the_state(module: torch.nn.Module, arguments: tuple[Tensor, ...], out: Tensor) -> None:
        arguments[0].add_(1e-9)

    model.coda.register_forward_hook(spoils_the_state)
    with pytest.raises(LawBroken, match="2 of 4 loops"):
        check_readouts(model, (1, 2, 4))

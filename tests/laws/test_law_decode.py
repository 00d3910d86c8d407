"""Law 2: one pass with keys kept is the full pass, however the tokens are cut, padded, batched or written again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from space import GRT, close, house, make, over_space, tokens
from torch import Tensor

from alcoda.model.config import ModelConfig
from alcoda.model.keys import KeyStore, Slot, View
from alcoda.model.lm import RecurrentLM

T = 12
EXACT = 1e-10

both_depths = pytest.mark.parametrize("n_loops", [1, 3])


@pytest.fixture(autouse=True)
def inference() -> None:
    """Keys are kept in place, without gradients."""
    with torch.no_grad():
        yield


def in_chunks(model: RecurrentLM, ids_BT: Tensor, n_loops: int, cuts: Sequence[int], store: KeyStore) -> Tensor:
    """Logits of all tokens, run in chunks of the given lengths."""
    return torch.cat([model(chunk, n_loops, store=store) for chunk in ids_BT.split(list(cuts), 1)], 1)


def check_cached(model: RecurrentLM, n_loops: int, store: type[KeyStore] = KeyStore) -> None:
    ids_BT = tokens(2, T)
    full = model(ids_BT, n_loops)
    # A capacity of 2 makes the buffers grow several times.
    for what, cuts in {
        "decoding from the first token": [1] * T,
        "prefill of 7, then decoding": [7, *[1] * (T - 7)],
        "chunked prefill": [3, 1, 6, 2],
    }.items():
        close(in_chunks(model, ids_BT, n_loops, cuts, store(capacity_tokens=2)), full, EXACT, what)


@both_depths
@over_space()
def test_prefill_and_decode_equal_the_full_pass(config: ModelConfig, n_loops: int) -> None:
    check_cached(make(config), n_loops)


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

LENGTHS = (T, 7, 1)
N_NEW = 3


def left_padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, pos, live): rows that end together. Padding has position 0, which is also the first token's."""
    width = max(len(row) for row in rows)
    ids_BT = torch.stack([torch.cat([torch.full((width - len(row),), 5), row]) for row in rows])
    first_B1 = torch.tensor([[width - len(row)] for row in rows])
    pos_BT = torch.arange(width) - first_B1
    return ids_BT, pos_BT.clamp(min=0), pos_BT >= 0


def check_left_padded(model: RecurrentLM, n_loops: int, hides_padding: bool = True, tells_pos: bool = True) -> None:
    whole = [tokens(1, n + N_NEW, seed=n)[0] for n in LENGTHS]
    alone = [model(row[None], n_loops)[0] for row in whole]
    ids_BT, pos_BT, live_BT = left_padded([row[:-N_NEW] for row in whole])
    if not hides_padding:
        live_BT = torch.ones_like(live_BT)
    store = KeyStore()
    place = {"pos_BT": pos_BT if tells_pos else None, "live_BT": live_BT}
    scored = model(ids_BT, n_loops, **place)
    kept = model(ids_BT, n_loops, **place, store=store)
    new_BT = torch.stack([row[-N_NEW:] for row in whole])
    decoded = torch.cat([model(new_BT[:, i : i + 1], n_loops, store=store) for i in range(N_NEW)], 1)
    for row, n in enumerate(LENGTHS):
        close(scored[row, -n:], alone[row][:n], EXACT, f"{n} tokens, left-padded, no store")
        close(kept[row, -n:], alone[row][:n], EXACT, f"{n} tokens, left-padded prefill")
        close(decoded[row], alone[row][n:], EXACT, f"decoding on from {n} left-padded tokens")


@both_depths
@over_space()
def test_left_padded_rows_equal_rows_alone(config: ModelConfig, n_loops: int) -> None:
    check_left_padded(make(config), n_loops)


def test_control_padding_that_is_seen_is_noticed() -> None:
    with pytest.raises(AssertionError, match="left-padded"):
        check_left_padded(make(house(**GRT)), 3, hides_padding=False)


def test_control_padding_that_shifts_learned_positions_is_noticed() -> None:
    with pytest.raises(AssertionError, match="left-padded"):
        check_left_padded(make(house(position="learned")), 1, tells_pos=False)


def test_rotary_positions_are_relative() -> None:
    check_left_padded(make(house(position="rope")), 3, tells_pos=False)


@both_depths
@over_space()
def test_a_row_may_idle_while_another_goes_on(config: ModelConfig, n_loops: int) -> None:
    """A chunk in which one row is all padding, at a position that the row has stored, leaves its keys alone."""
    model = make(config)
    whole_BT = tokens(2, 7)
    alone = model(whole_BT, n_loops)
    store = KeyStore()
    first = model(whole_BT[:, :3], n_loops, store=store)
    pos_BT, live_BT = torch.tensor([[3, 4, 5], [0, 0, 0]]), torch.tensor([[True] * 3, [False] * 3])
    second = model(whole_BT[:, 3:6], n_loops, pos_BT=pos_BT, live_BT=live_BT, store=store)
    third = model(torch.stack([whole_BT[0, 6:7], whole_BT[1, 3:4]]), n_loops, store=store)
    close(first, alone[:, :3], EXACT, "before")
    close(second[0], alone[0, 3:6], EXACT, "the row that went on")
    close(third, torch.stack([alone[0, 6:7], alone[1, 3:4]]), EXACT, "after the row idled")


@over_space()
def test_a_row_of_nothing_but_padding_spoils_no_other(config: ModelConfig) -> None:
    """Its queries see no key at all. What they compute is not a number that anyone reads, but it must be a number."""
    model = make(config)
    ids_BT = tokens(2, 5)
    live_BT = torch.tensor([[True] * 5, [False] * 5])
    pos_BT = torch.arange(5).expand(2, 5) * live_BT
    store = KeyStore()
    logits = model(ids_BT, 3, pos_BT=pos_BT, live_BT=live_BT, store=store)
    close(logits[:1], model(ids_BT[:1], 3), EXACT, "the live row")
    assert logits.isfinite().all()
    new_BT = tokens(2, 1, seed=9)
    later = model(new_BT, 3, store=store)
    close(later[:1], model(torch.cat([ids_BT[:1], new_BT[:1]], 1), 3)[:, -1:], EXACT, "the live row, one on")
    close(later[1:], model(new_BT[1:], 3), EXACT, "the row that begins after its padding")


# -- batch-mates ------------------------------------------------------------------------------------------------------


def check_batch_mates(model: RecurrentLM, n_loops: int) -> None:
    one, other = tokens(3, T), tokens(3, T, seed=1)
    other[0] = one[0]
    assert torch.equal(model(one, n_loops)[0], model(other, n_loops)[0]), "batch-mates change a full pass"
    cuts = [5, *[1] * (T - 5)]
    kept = [in_chunks(model, ids_BT, n_loops, cuts, KeyStore())[0] for ids_BT in (one, other)]
    assert torch.equal(*kept), "batch-mates change decoding"
    close(model(one[:1], n_loops)[0], model(one, n_loops)[0], EXACT, "alone and in a batch")


@both_depths
@over_space()
def test_batch_mates_change_nothing(config: ModelConfig, n_loops: int) -> None:
    check_batch_mates(make(config), n_loops)


def test_control_rows_that_mix_are_noticed() -> None:
    model = make(house(**GRT))
    model.update.register_forward_hook(lambda module, args, out: out + 1e-12 * out.mean(0))
    with pytest.raises(AssertionError, match="batch-mates"):
        check_batch_mates(model, 3)


# -- writing again ----------------------------------------------------------------------------------------------------


def check_written_again(model: RecurrentLM, n_loops: int, store: type[KeyStore] = KeyStore) -> None:
    """From token 4 on the text is written anew, at the positions that it had."""
    old_BT, from_ = tokens(2, T), 4
    new_BT = old_BT.clone()
    new_BT[:, from_:] = tokens(2, T - from_, seed=7)
    expected = model(new_BT, n_loops)[:, from_:]
    pos_BT = torch.arange(from_, T).expand(2, -1)
    for cuts in ([T - from_], [1] * (T - from_), [3, T - from_ - 3]):
        keys = store()
        model(old_BT, n_loops, store=keys)
        chunks = zip(new_BT[:, from_:].split(cuts, 1), pos_BT.split(cuts, 1), strict=True)
        again = [model(ids, n_loops, pos_BT=pos, store=keys) for ids, pos in chunks]
        close(torch.cat(again, 1), expected, EXACT, f"written again in chunks of {cuts}")
        # And on: the next position follows the text, not the count of keys.
        next_B1 = tokens(2, 1, seed=8)
        whole = model(torch.cat([new_BT, next_B1], 1), n_loops)[:, -1:]
        close(model(next_B1, n_loops, store=keys), whole, EXACT, "the token after what was written again")


@both_depths
@over_space()
def test_a_token_written_again_replaces_its_key(config: ModelConfig, n_loops: int) -> None:
    check_written_again(make(config), n_loops)


class Hoarder(KeyStore):
    """A store that forgets to retire the old key of a token that is written again."""

    def open(self, *args, **kwargs) -> View:
        view = super().open(*args, **kwargs)
        if self._pos_BS is None:
            return view
        self._live_BS = torch.ones_like(self._live_BS)
        return View.tagged(view.pos, self._pos_BS, self._live_BS)


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
    assert store._live_BS.sum(1).tolist() == [6, 3]
    n_again = 3  # of the short row all, of the long row the first three: the rest of it stands after the new keys
    again = model(
        torch.stack([row[:n_again] for row in new]), 3, pos_BT=torch.arange(n_again).expand(2, -1), store=store
    )
    for row in range(2):
        close(again[row], model(new[row][None], 3)[0, :n_again], EXACT, f"row {row}")
    assert store._live_BS.sum(1).tolist() == [6, 3]


@over_space()
def test_the_order_of_tagged_tokens_does_not_matter(config: ModelConfig) -> None:
    """In one pass, a token is where its position says, not where it lies."""
    model = make(config)
    ids_BT = tokens(2, T)
    order = torch.randperm(T)
    shuffled = model(ids_BT[:, order], 3, pos_BT=order.expand(2, -1))
    close(shuffled, model(ids_BT, 3)[:, order], EXACT, "shuffled tokens with their positions")


# -- one store, one depth ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1)], ids=["deeper", "shallower"])
@over_space()
def test_a_store_refuses_another_depth(config: ModelConfig, first: int, then: int) -> None:
    model, ids_BT = make(config), tokens(2, T)
    store = KeyStore()
    model(ids_BT[:, :-1], first, store=store)
    with pytest.raises(ValueError, match="one store serves one number of loops; start a new store"):
        model(ids_BT[:, -1:], then, store=store)
    # The refusal changed nothing: the store goes on at its own depth.
    close(model(ids_BT[:, -1:], first, store=store), model(ids_BT, first)[:, -1:], EXACT, "after the refusal")


def test_a_store_serves_one_readout() -> None:
    with pytest.raises(ValueError, match="a store serves one depth"):
        next(make(house()).readouts(tokens(1, T), [1, 3], store=KeyStore()))


@pytest.mark.parametrize("loops", [[], [0], [2, 1], [1, 1]])
def test_readouts_need_increasing_depths(loops: list[int]) -> None:
    with pytest.raises(ValueError, match="must be increasing and at least 1"):
        next(make(house()).readouts(tokens(1, T), loops))


@over_space()
def test_readouts_of_one_run_equal_runs_of_their_own(config: ModelConfig) -> None:
    model, ids_BT = make(config), tokens(2, T)
    for n_loops, y_BTD in zip([1, 2, 4], model.readouts(ids_BT, [1, 2, 4]), strict=True):
        assert torch.equal(model.logits(y_BTD), model(ids_BT, n_loops))

"""Law 4 of a memory: passes, prefill and decoding come to what reading token by token makes; and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from space import GRT, Case, cases, house, over_space
from torch import Tensor

from alcoda.laws import memory as law
from alcoda.laws import refinement
from alcoda.laws.law import LawBroken
from alcoda.laws.refinement import Kept, refinement_gradients
from alcoda.laws.subject import Subject, is_causal, make_plain
from alcoda.model import memory, passes, prefill, rewrite
from alcoda.model.config import ModelConfig
from alcoda.model.keys import Context, Keys, Slot, View
from alcoda.model.lm import RecurrentLM
from alcoda.model.memory import PrevTokenModule, ResidualModule
from alcoda.model.prefill import SUBSETS, IteratedPrefill, Prefill, prefills
from alcoda.model.rewrite import Again, KeyPages
from alcoda.training.passes import Chunked, Sequential


def carries(config: ModelConfig) -> bool:
    return config.memory.carries


def reads_on(config: ModelConfig) -> bool:
    return config.memory.carries and is_causal(config, trains=False)


def remembers(**fields: Any) -> ModelConfig:
    return house(memory={"kind": "prev_token", **fields}, **GRT)


MORE: dict[str, dict[str, Any]] = {
    "per layer, with all": {"share": "per_layer", "beta": 0.3},
    "shared, ungated, from the core": {"gates": False, "source": "core"},
    "keys only, of three": {"residual": False, "mean_of": 3, "lag": 2, "source": "prelude.0"},
}
"""Memories beside those of the space."""

more = pytest.mark.parametrize("fields", MORE.values(), ids=MORE)
CHECKS = (law.refinement, law.zero_memory, law.refinement_is_causal, refinement_gradients, law.prefill_then_decode)


@over_space(reads_on)
def test_refined_token_by_token_is_reading_one_by_one(config: ModelConfig) -> None:
    law.refinement(Subject(config))


@over_space(carries)
def test_zero_memories_are_the_first_pass(config: ModelConfig) -> None:
    law.zero_memory(Subject(config))


@over_space(lambda config: law.is_plain(Subject(config)) is None)
def test_a_fresh_memory_that_is_zero_is_none(config: ModelConfig) -> None:
    law.without_memory(Subject(config))


@over_space(reads_on)
def test_refinement_is_causal(config: ModelConfig) -> None:
    law.refinement_is_causal(Subject(config))


@over_space(carries)
def test_gradients_are_those_of_keeping_everything(config: ModelConfig) -> None:
    refinement_gradients(Subject(config))


READERS = [case for case in cases() if reads_on(case.config)]


@pytest.mark.parametrize(("n", "case"), [*enumerate(READERS)], ids=[case.name for case in READERS])
def test_prefill_and_decoding(n: int, case: Case) -> None:
    """Padded rows by two of the prefills, others from case to case: they know little of a design."""
    model, every = make_plain(case.config), list(prefills().values())
    law.check_prefill(model)
    for i in range(2):
        law.check_prefill_in_batches(model, every[(2 * n + i) % len(every)].resolve(SUBSETS))
    law.check_rows_stop_alone(model)


@more
def test_more_memories_keep_the_laws(fields: dict[str, Any]) -> None:
    for check in (*CHECKS, law.without_memory):
        check(Subject(remembers(**fields)))


def test_chunks_of_one_token_are_sequential() -> None:
    assert Chunked(tokens=1).of(7) == Sequential().of(7)


def test_the_law_of_refinement_speaks_of_what_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control of the exception: evaluation that takes the top of what it sees reads otherwise one by one."""
    leaky = house(memory="prev_token", route={"kind": "expert_choice", "auxiliary": "none"})
    assert not reads_on(leaky)
    monkeypatch.setattr(law, "LOOPS", 3)
    with pytest.raises(LawBroken, match="changes logits before it"):
        law.check_refinement_is_causal(make_plain(leaky), 2, n_tokens=40)


# -- planted faults ---------------------------------------------------------------------------------------------------

SUBJECT = Subject(remembers(beta=0.3))


def broken(check: Callable[[Subject], None], match: str, subject: Subject = SUBJECT) -> None:
    with pytest.raises(LawBroken, match=match):
        check(subject)


def test_the_subject_of_the_faults_keeps_every_law() -> None:
    for check in (*CHECKS, law.without_memory):
        check(SUBJECT)


@pytest.mark.parametrize("by", [-1, 1], ids=["the token's own", "of two before"])
def test_control_a_memory_of_another_token_in_training(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    put = passes._put
    monkeypatch.setattr(passes, "_put", lambda *args: put(*args).roll(by, 1))
    broken(law.refinement, f"{law.T} subsets: the last state is not that of reading")
    broken(refinement_gradients, "the loss of the passes")
    if by < 0:
        broken(law.refinement_is_causal, "leak")


def test_control_a_memory_of_another_token_in_a_whole_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which reading one by one and passes over some tokens do not share."""
    recall = PrevTokenModule.recall

    def shifted(self: PrevTokenModule, sources_BTD: Tensor) -> Tensor:
        right_BTD = recall(self, sources_BTD)
        return right_BTD if right_BTD.size(1) == 1 else right_BTD.roll(1, 1)

    monkeypatch.setattr(PrevTokenModule, "recall", shifted)
    broken(law.refinement, f"{law.T} subsets: .*; {law.T} refinements: ")
    broken(law.prefill_then_decode, "as many passes as a chunk has tokens: ")


def test_control_stale_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = KeyPages._merged
    monkeypatch.setattr(
        KeyPages, "_merged", lambda self, old, new, dim: merged(self, old, new, dim) if self.is_new else old
    )
    broken(law.refinement, f"{law.T} subsets: the last state is not that of reading")
    broken(refinement_gradients, "the loss of the passes")


def test_control_keys_at_the_wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = KeyPages._merged
    monkeypatch.setattr(KeyPages, "_merged", lambda self, old, new, dim: merged(self, old, new.flip(dim), dim))
    broken(law.refinement, "2 subsets: prefill is not as training")
    broken(refinement_gradients, "the loss of the passes")


def test_control_detached_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    run = passes.run_passes
    monkeypatch.setattr("alcoda.training.passes.run_passes", lambda *args, **how: run(*args[:4], True, **how))
    broken(refinement_gradients, "0 free loops: gradients are not those of passes that keep everything")


def test_control_a_gradient_that_is_missing_is_zero_and_no_other() -> None:
    """What one side reads and the other does not: right where that makes no difference to it."""
    some, none = torch.ones(2), torch.zeros(2)
    grads = {"a": None, "b": some, "c": None, "d": none, "e": some}
    expected = {"a": some, "b": None, "c": none, "d": None, "e": some}
    assert list(refinement._off(grads, expected)) == ["a", "b"]


def test_control_detached_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    held = KeyPages.held
    monkeypatch.setattr(KeyPages, "held", lambda self, slot: tuple(x.detach() for x in held(self, slot) or ()) or None)
    law.refinement(SUBJECT)
    broken(refinement_gradients, "gradients are not those of passes that keep everything")


def test_control_one_page_for_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is right, until a recomputed loop finds there the keys of a later pass."""
    held: dict[Slot, Keys] = {}

    def write(self: KeyPages, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        keys = k_BGTK, v_BGTK
        if self.earlier is not None:
            keys = self._merged(held[slot][0], k_BGTK, 2), self._merged(held[slot][1], v_BGTK, 2)
        held[slot] = keys
        return keys

    monkeypatch.setattr(KeyPages, "write", write)
    law.refinement(SUBJECT)
    with pytest.raises(LawBroken, match="0 free loops, recomputed: gradients are not those") as error:
        refinement_gradients(SUBJECT)
    assert "0 free loops: " not in error.value.message


def test_control_a_mask_that_sees_future_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = KeyPages.open

    def sees_all(self: KeyPages, *args: Any) -> View:
        view = opened(self, *args)
        return view if view.mask is None else view._replace(mask=torch.ones_like(view.mask))

    monkeypatch.setattr(KeyPages, "open", sees_all)
    broken(law.refinement_is_causal, "2 subsets: leak: a changed token changes logits before it")
    broken(law.refinement, "subsets: the last state is not that of reading")
    broken(refinement_gradients, "the loss of the passes")


def test_control_a_token_that_its_passes_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    of = passes.Pass.of
    monkeypatch.setattr(passes.Pass, "of", lambda self, x: of(self, x) * (x.dim() > 2))
    broken(law.refinement_is_causal, "pass 0: the token at 1 changes nothing at 1")


@pytest.mark.parametrize("name", ["alpha", "gate"])
def test_control_a_start_that_is_not_neutral(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def off(self: Any, init: Callable[[Any], None]) -> None:
        init(self)
        with torch.no_grad():
            (self.alpha if name == "alpha" else self.gate.weight).add_(0.01)

    module = ResidualModule if name == "alpha" else memory.RecallModule
    init = module.init_special
    monkeypatch.setattr(module, "init_special", lambda self: off(self, init))
    broken(law.without_memory, "it is not the model without memory")


def test_control_no_memory_that_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = PrevTokenModule.enter

    def of_itself(self: PrevTokenModule, context: Context, x0_BTD: Tensor, memory_BTD: Tensor | None) -> Context:
        return enter(self, context, x0_BTD, x0_BTD if memory_BTD is None else memory_BTD)

    monkeypatch.setattr(PrevTokenModule, "enter", of_itself)
    broken(law.zero_memory, "no memories are not zero memories")
    broken(law.without_memory, "it is not the model without memory")


def test_control_a_memory_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    enter = PrevTokenModule.enter
    monkeypatch.setattr(PrevTokenModule, "enter", lambda self, context, x0, m: enter(self, context, x0, None))
    broken(law.zero_memory, "positive control: other memories change nothing")
    broken(law.refinement, "positive control: the memory changes nothing")


# -- planted faults of prefill ----------------------------------------------------------------------------------------


def test_control_a_reader_that_forgets_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill.Chunk, "last", staticmethod(lambda carried, sources, live: torch.zeros_like(carried)))
    broken(law.prefill_then_decode, "prefill and decoding are not one by one")


def test_control_a_reader_that_carries_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    last = prefill.Chunk.last
    monkeypatch.setattr(
        prefill.Chunk, "last", staticmethod(lambda carried, sources, live: last(carried, sources, None))
    )
    broken(law.prefill_then_decode, "exact, left-padded: .*tokens: prefill exact, left-padded: off by")


def test_control_a_pass_again_that_fills_up_with_what_it_should_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of fewer tokens are filled up with others, which are to stay as they are."""

    def careless(store: Any, tokens: range | Tensor, real_BK: Tensor | None = None) -> Again:
        return Again(store, tokens, None if real_BK is None else torch.ones_like(real_BK))

    monkeypatch.setattr(prefill, "Again", careless)
    broken(law.prefill_then_decode, "interleaved, left-padded: ")


def test_control_keys_of_a_pass_again_that_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(self: Again, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        return self.store.held(slot, k_BGTK, v_BGTK)

    monkeypatch.setattr(rewrite.Again, "write", held)
    broken(law.prefill_then_decode, f"{law.T} subsets: prefill and decoding are not one by one")
    broken(law.refinement, "2 subsets: prefill is not as training")


def test_control_rows_that_go_on_for_their_batch_mates(monkeypatch: pytest.MonkeyPatch) -> None:
    again = prefill.Chunk.again
    monkeypatch.setattr(prefill.Chunk, "again", lambda self, first, stride, rows_B=None: again(self, first, stride))
    broken(law.prefill_then_decode, "iterated: .*batch-mates change when a row stops")


def test_control_a_prefill_of_a_plugin_is_read_too() -> None:
    """Every registered prefill is under the law: this one depends on its batch."""
    before = dict(Prefill.choices)
    try:

        class Sways(IteratedPrefill):
            kind: Literal["sways"] = "sways"

            def read(self, chunk: prefill.Chunk) -> None:
                chunk.at_once()
                chunk.y_BTD = chunk.y_BTD + 1e-6 * chunk.y_BTD.mean(0)

        broken(law.prefill_then_decode, "sways, left-padded: .*prefill sways, left-padded: off by")
    finally:
        Prefill.choices.clear()
        Prefill.choices.update(before)


def test_control_a_reference_that_keeps_the_first_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow store too can fail: one that keeps what it wrote first is not what the passes do."""
    write = Kept.write

    def first_only(self: Kept, slot: Slot, k_BGTK: Tensor, v_BGTK: Tensor) -> Keys:
        first = dict(self.slots.get(slot, {}))
        found = write(self, slot, k_BGTK, v_BGTK)
        self.slots[slot].update(first)
        return found

    monkeypatch.setattr(Kept, "write", first_only)
    broken(refinement_gradients, "the loss of the passes")


def test_models_without_a_memory_are_not_spoken_of() -> None:
    plain = Subject(house())
    assert law.has_none(plain) == "memory none carries nothing from token to token"
    assert law.is_plain(plain) == "memory none adds nothing"
    assert law.is_plain(Subject(house(memory="gated"))) is None
    assert isinstance(RecurrentLM(plain.config).memory, memory.MemoryModule)

"""How prompts are read: one, part by part, right into its span of the arena; or several whole ones in one pass, whose
keys are then put into theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from alcoda.depth.exiting import Exits, pick_coda_keys
from alcoda.depth.sequential import ExitReader
from alcoda.depth.watch import ExitTest
from alcoda.engine.cache import Arena, WholeKeys
from alcoda.engine.request import Completion, Request
from alcoda.engine.scheduler import Part
from alcoda.model.exit_keys import CODA
from alcoda.model.keys import Keys, Slot
from alcoda.model.lm import RecurrentLM
from alcoda.model.prefill import Reader


class Prompts:
    """Reads prompts of one model into an arena."""

    def __init__(self, model: RecurrentLM, arena: Arena) -> None:
        self.model, self.arena, self.device = model, arena, model.embed.weight.device

    def open(self, completion: Completion) -> None:
        """Make ready to read a prompt into the completion's span."""
        assert completion.span is not None
        reader = self.reader([completion.request], completion.n_loops, completion.span.stop - completion.span.start)
        completion.coda_per_loop = reads_every_loop(completion.request.test)
        slots = self.arena.slots(completion.span)
        if not completion.coda_per_loop:
            # The reader writes the coda's keys at whatever loop it reads out; all are one slot.
            last = [slot for slot in slots if slot[0] == CODA]
            loops = range(self.arena.n_loops)
            slots |= {(stage, layer, loop): slots[stage, layer, 0] for stage, layer, _ in last for loop in loops}
        reader.store.slots = slots
        completion.reader = reader

    def reader(self, requests: Sequence[Request], n_loops: int, n_tokens: int) -> Reader:
        """What reads the prompts of requests that have one exit test, a row each."""
        test, policy = requests[0].test, self.arena.policy
        if test is None:
            return Reader(self.model, n_loops, n_tokens, policy)
        of_rows = test.of_rows([request.row for request in requests])
        return ExitReader(self.model, Exits(of_rows, pick_coda_keys(test, None), cache=policy, compact=True), n_tokens)

    def read(self, parts: Sequence[Part]) -> Tensor | None:
        """Read a part of a prompt, or several whole prompts that are read alike; logits of the token after each,
        [N, V], None where the prompt goes on."""
        first, n_tokens = parts[0].completion, [stop - start for _, start, stop in parts]
        reader = first.reader if len(parts) == 1 else self._together(parts, max(n_tokens))
        prefill = first.request.prefill if first.request.test is None else None
        ids_BT, live_BT = self._padded([one.request.prompt[start:stop] for one, start, stop in parts])
        y_BTD = reader.read(ids_BT, prefill, live_BT=live_BT)
        depths = [[first.n_loops] * n for n in n_tokens]
        if isinstance(reader, ExitReader):
            depths = reader.depths_BT().tolist()
            reader.depths.clear()
        for part, n, row in zip(parts, n_tokens, depths, strict=True):
            part.completion.prompt_loops += row[:n]
        if parts[0].stop < len(first.request.prompt):
            return None
        reader.store.settle()
        if len(parts) > 1:
            self._put(reader.store.slots, parts)
        for i, part in enumerate(parts):
            part.completion.carried_LD = None if reader.carried_BLD is None else reader.carried_BLD[i]
            part.completion.reader = None
        row_B, last_B = torch.tensor([[i, n - 1] for i, n in enumerate(n_tokens)], device=self.device).unbind(1)
        return self.model.logits(y_BTD[row_B, last_B])

    def _together(self, parts: Sequence[Part], n_tokens: int) -> Reader:
        """What reads several prompts of ``n_tokens``, padded; its keys are its own."""
        reader = self.reader([part.completion.request for part in parts], parts[0].completion.n_loops, n_tokens)
        reader.store = WholeKeys(reader.store.n_slots, n_tokens)
        return reader

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
        """Rows of ids, and which of them are no padding; None: all."""
        n_most = max(map(len, texts))
        # Padded with its own last token: what is a number in a prompt, is one behind it.
        ids_BT = torch.tensor([[*text, *[text[-1]] * (n_most - len(text))] for text in texts], device=self.device)
        n_B1 = torch.tensor([[len(text)] for text in texts], device=self.device)
        is_even = all(len(text) == n_most for text in texts)
        return ids_BT, None if is_even else torch.arange(n_most, device=self.device) < n_B1

    def _put(self, slots: dict[Slot, Keys], parts: Sequence[Part]) -> None:
        """Keys of prompts that were read together, into their spans."""
        per_loop = parts[0].completion.coda_per_loop
        at = {slot if per_loop or slot[0] != CODA else (*slot[:2], 0): keys for slot, keys in slots.items()}
        texts = []
        for completion, _, n_tokens in parts:
            assert completion.span is not None
            texts.append((completion.span.start, n_tokens))
        self.arena.fill(at, texts)


def reads_every_loop(test: ExitTest | None) -> bool:
    """Whether the coda reads a text with keys of each loop."""
    return test is not None and pick_coda_keys(test, None) == "per_loop"

"""Every law, in the order of docs/design, section 7."""

from __future__ import annotations

from alcoda.laws import attend, causal, decode, gradients, ledger, memory, noise, precision, refinement, resume, sharing
from alcoda.laws.law import Law
from alcoda.laws.subject import declares_leak, has_no_own_depth, leaks_at_eval, needs_loops

LAWS: tuple[Law, ...] = (
    Law("no_leak", 1, "a token changes no logits before it", causal.no_leak, leaks_at_eval),
    Law(
        "no_leak_in_training",
        1,
        "nor with gradients and noise",
        causal.no_leak_in_training,
        lambda subject: declares_leak(subject, trains=True),
    ),
    Law("cached", 2, "prefill, chunks and decoding are the full pass", decode.cached, leaks_at_eval),
    Law("left_padded", 2, "left-padded rows are the rows alone", decode.padded, leaks_at_eval),
    Law("idle_rows", 2, "a row that waits keeps its keys, and spoils no other", decode.idle, leaks_at_eval),
    Law(
        "own_depth",
        2,
        "rows of their own depth are the rows alone",
        decode.own_depth,
        lambda subject: needs_loops(subject) or has_no_own_depth(subject),
    ),
    Law("batch_mates", 2, "what else is in the batch changes nothing", decode.batch_mates, leaks_at_eval),
    Law("written_again", 2, "a token that is written again replaces its keys", decode.written_again, leaks_at_eval),
    Law("order", 2, "a token is where its position says", decode.order, leaks_at_eval),
    Law(
        "one_depth",
        2,
        "a store refuses another number of loops",
        decode.one_depth,
        lambda subject: needs_loops(subject) or leaks_at_eval(subject),
    ),
    Law("readouts", 2, "depths read from one run are runs of their own", decode.readouts, needs_loops),
    Law("deterministic", 2, "evaluation is not random, training is of its seed", noise.deterministic),
    Law(
        "refinement",
        4,
        "refined token by token, passes are reading one by one",
        memory.refinement,
        lambda subject: memory.has_none(subject) or leaks_at_eval(subject),
    ),
    Law("zero_memory", 4, "zero memories are the first pass of training", memory.zero_memory, memory.has_none),
    Law("without_memory", 4, "a fresh memory that is zero is none", memory.without_memory, memory.is_plain),
    Law(
        "refinement_is_causal",
        4,
        "a token changes no pass before it",
        memory.refinement_is_causal,
        lambda subject: memory.has_none(subject) or leaks_at_eval(subject),
    ),
    Law(
        "refinement_gradients",
        4,
        "passes have the gradients of keeping everything",
        refinement.refinement_gradients,
        memory.has_none,
    ),
    Law(
        "prefill_then_decode",
        4,
        "prefill, and decoding after it, as each says of itself",
        memory.prefill_then_decode,
        lambda subject: memory.has_none(subject) or leaks_at_eval(subject),
    ),
    Law("gradients", 5, "gradients reach every parameter", gradients.every_parameter),
    Law("derivative", 5, "the loss changes as its gradient says", gradients.derivative),
    Law("free_loops", 5, "loops without gradients carry none", gradients.free_loops, needs_loops),
    Law("recompute", 5, "activation checkpointing changes no bit", gradients.recompute),
    Law("kernels", 5, "attention kernels equal their naive reference", attend.kernels),
    Law("params", 6, "the ledger's parameters are the model's", ledger.params),
    Law("tied", 6, "loops that share weights are one function", sharing.tied, sharing.not_tied),
    Law("forward_flops", 6, "the ledger's forward FLOPs are counted", ledger.forward_flops, ledger.counted_by_chance),
    Law(
        "training_flops", 6, "the ledger's training FLOPs are counted", ledger.training_flops, ledger.counted_by_chance
    ),
    Law("kv_bytes", 6, "the ledger's cache bytes are the store's", ledger.kv_bytes, leaks_at_eval),
    Law("config", 6, "the config survives JSON", ledger.config_round_trip),
    Law("checkpoint", 6, "weights survive a checkpoint to the bit", ledger.checkpoint_round_trip),
    Law("resume", 6, "a resumed run is the uninterrupted one, to the bit", resume.check_resume, resume.too_long),
    Law("bf16", 7, "bf16 is near fp32", precision.bf16, precision.rounding_moves_tokens),
    Law("compiled", 7, "a compiled pass is near an eager one", precision.compiled, precision.cannot_compile),
)

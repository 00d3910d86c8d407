"""What commands print: tables, lines of JSON, numbers with a unit."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alcoda.stderr import STDERR


def say(text: str) -> None:
    """A line on stderr: beside what scripts read."""
    print(text, file=STDERR, flush=True)


def print_json(value: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None, n_left: int = 1
) -> None:
    """A table as wide as it needs."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < n_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it needs: a wrapped row can be read, a number that is cut off cannot.
    console = Console()
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=500), table).maximum)
    console.print(table)


def flops(number: float) -> str:
    """With a unit, to three places."""
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3f} {unit}"
    return f"{number:.0f}"


def print_scores(result: Any) -> None:
    """An `EvalResult` as two tables: by depth, and by position in the row."""
    saved = {g.to_loops: signed(g.bits_per_byte, g.low, g.high) for g in result.gain}
    rows = [
        [
            str(d.loops),
            f"{d.loss:.4f}",
            f"{d.bits_per_byte:.4f}",
            f"[{d.low:.4f}, {d.high:.4f}]",
            saved.get(d.loops, ""),
        ]
        for d in result.by_depth
    ]
    how = None if result.prefill is None else f"rows read by {fields(result.prefill)} prefill"
    how = how and how + (f", {result.chunk_tokens} tokens at a time" if result.chunk_tokens else "")
    if result.cache["kind"] != "per_loop":
        how = f"rows read token by token, with cache {fields(result.cache)}"
    print_table(["loops", "nats/token", "bits/byte", "95%", f"gain over {result.by_depth[0].loops}"], rows, how)
    head = ["loops", *(f"{p.start}-{p.stop - 1}" for p in result.by_position)]
    rows = [[str(n), *(f"{p.bits_per_byte[n]:.4f}" for p in result.by_position)] for n in result.bits_per_byte]
    print_table(head, rows, "bits/byte by the position in its row of the token that it is predicted from")


def print_prefills(result: Any) -> None:
    """A `PrefillsResult` as a table."""
    rows = []
    for one in result.by_prefill:
        cells = [fields(one.prefill)]
        for bits in (one.whole, one.continuation):
            cells += [f"{bits.bits_per_byte:.4f} [{bits.low:.4f}, {bits.high:.4f}]"]
            cells += ["" if bits.gap is None else signed(bits.gap, bits.gap_low, bits.gap_high)]
        rows.append([*cells, f"{one.read_s:.2f}", f"{one.tokens_per_s:,.0f}"])
    chunks = f", {result.chunk_tokens} tokens at a time" if result.chunk_tokens else ""
    print_table(
        ["prefill", "bits/byte, 95%", "gap to exact", "after a prompt", "gap to exact", "seconds", "tokens/s"],
        rows,
        f"at {result.loops} loop{'s' if result.loops != 1 else ''}, {result.batch_size} rows at a time{chunks}; "
        f"after a prompt: of {result.prompt_tokens} tokens read so, the rest token by token",
    )


def print_caches(result: Any) -> None:
    """A `CachesResult` as a table."""
    rows = []
    for one in result.by_cache:
        bits, kept = one.bits, one.bytes_per_token
        rows.append(
            [
                fields(one.cache),
                f"{bits.bits_per_byte:.4f} [{bits.low:.4f}, {bits.high:.4f}]",
                "" if bits.gap is None else signed(bits.gap, bits.gap_low, bits.gap_high),
                f"{one.loss:.4f}",
                "" if kept is None else f"{kept:,}",
                f"{1000 * one.s_per_token:.3f}",
            ]
        )
    print_table(
        ["cache", "bits/byte, 95%", "gap to per_loop", "nats/token", "KV bytes/token", "ms/token"],
        rows,
        f"at {result.loops} loop{'s' if result.loops != 1 else ''}, token by token, {result.batch_size} rows at a time",
    )


def print_exit(result: Any) -> None:
    """An `ExitResult` as a table, and the depths of tokens in a line."""
    of_all = result.flops_per_token / result.deepest_flops_per_token
    row = [
        exit_words(result.exit),
        f"{result.bits_per_byte:.4f} [{result.low:.4f}, {result.high:.4f}]",
        signed(result.gap, result.gap_low, result.gap_high),
        f"{result.excess:+.2%}",
        f"{result.mean_loops:.2f} of {result.n_loops}",
        f"{flops(result.flops_per_token)} ({of_all:.0%})",
    ]
    if result.cache["kind"] != "per_loop":
        print(f"with cache {fields(result.cache)}, also where all tokens run {result.n_loops} loops")
    head = ["exit", "bits/byte, 95%", f"gap to {result.n_loops} loops", "of the loss", "mean loops", "FLOPs/token"]
    print_table(head, [row])
    n_tokens = sum(result.depths.values())
    print("tokens by loops: " + ", ".join(f"{loop}: {n / n_tokens:.1%}" for loop, n in result.depths.items() if n))


def print_probe(result: Any) -> None:
    """A `ProbeResult` as a table by loop, and the whole in a line."""
    rows = [[str(one.loop), f"{one.share:.3f}", "" if one.auc is None else f"{one.auc:.3f}"] for one in result.by_loop]
    print_table(["after loop", f"{result.label}: share", "AUC"], rows)
    area = "" if result.auc is None else f"AUC {result.auc:.3f}, "
    print(
        f"held out, {result.n_held_out:,} states: {area}accuracy {result.accuracy:.3f} (always the likelier: "
        f"{max(result.share, 1 - result.share):.3f}), {result.loss:.4f} nats (the share alone: "
        f"{result.base_loss:.4f}), calibration error {result.calibration_error:.4f}"
    )


def print_tiers(result: Any) -> None:
    """`Tiers` as a table."""
    rows = []
    for tier in result.tiers:
        held, uniform, covers = tier.held_out, tier.uniform_held_out, tier.coverage
        rows.append(
            [
                tier.name,
                f"{tier.tolerance:.2%}",
                exit_words(tier.rule.model_dump()),
                f"{tier.calib.excess:+.3%}",
                f"{held.excess:+.3%} [{held.excess_low:+.3%}, {held.excess_high:+.3%}]",
                f"{held.mean_loops:.2f}",
                f"{held.flops_per_token / result.flops_per_token:.0%}",
                f"{tier.uniform_loops} ({uniform.excess:+.3%}, {uniform.flops_per_token / result.flops_per_token:.0%})",
                "" if covers is None else f"{covers.before:.0%}, {covers.same:.0%}, {covers.after:.0%}",
            ]
        )
    head = ["tier", "tolerance", "rule", f"loss on {result.data}", f"on {result.held_out_data}, 95%", "mean loops"]
    head += ["FLOPs", "smallest uniform depth", f"before, at, after {result.imitates or 'the other'}"]
    print_table(head, rows, f"against all tokens at {result.n_loops} loops", n_left=3)


def print_frontier(result: Any) -> None:
    """A `FrontierResult` as a table."""
    deepest = result.uniform[-1].flops_per_token

    def cells(point: Any) -> list[str]:
        return [f"{point.bits_per_byte:.4f}", f"{point.excess:+.2%}", f"{point.flops_per_token / deepest:.0%}"]

    rows = [["uniform", str(one.loops), *cells(one), "", "", ""] for one in result.uniform]
    for curve in result.curves:
        name = f"{curve.rule}, readout-only" if curve.is_upper_bound else curve.rule
        for i, point in enumerate(curve.points):
            against = (point.at_equal_loops, point.at_equal_flops, point.over_sufficient)
            saved = [signed(one.bits_per_byte, one.low, one.high) for one in against]
            mark = " *" if i == curve.best else ""
            rows.append([name + mark, f"{point.mean_loops:.2f}", *cells(point), *saved])
    head = ["", "loops", "bits/byte", "of the loss", "FLOPs", "saved at equal loops", "at equal FLOPs"]
    print_table([*head, f"against {result.sufficient_loops} loops"], rows)
    print(
        f"* the fewest loops within {result.tolerance:.2%} of the loss of {result.n_loops}; all tokens at "
        f"{result.sufficient_loops} are within it too. Saved: bits per byte, 95%. Readout-only is an upper bound"
    )
    for name, why in result.left_out.items():
        say(f"without {name}: {why}")


def exit_words(rule: Mapping[str, Any]) -> str:
    """An exit rule with what is set of it."""
    own = {name: value for name, value in rule.items() if name in ("threshold", "loops") and value is not None}
    words = [" ".join(f"{x:.3g}" for x in v) if isinstance(v, list | tuple) else f"{v:.3g}" for v in own.values()]
    return f"{rule['kind']}:{words[0]}" if words else str(rule["kind"])


def signed(value: float, low: float, high: float) -> str:
    """A difference with its interval."""
    return f"{value:+.4f} [{low:+.4f}, {high:+.4f}]"


def fields(choice: Mapping[str, Any]) -> str:
    """A choice in words: its kind, and its other fields."""
    rest = ", ".join(f"{name} {value}" for name, value in choice.items() if name != "kind")
    return f"{choice['kind']} ({rest})" if rest else str(choice["kind"])


def print_ledger(name: str, one: Any) -> None:
    """A `Ledger` as a table, and its means in a line."""
    rows = [
        [t.name, f"{t.params:,}", flops(t.forward_flops), flops(t.training_flops), f"{t.kv_bytes:,}"] for t in one.terms
    ]
    rows.append(
        [
            "total",
            f"{one.params:,}",
            flops(one.forward_flops_per_token),
            flops(one.training_flops_per_token),
            f"{one.kv_bytes_per_token:,}",
        ]
    )
    print_table(["a token", "params", "forward FLOPs", "training FLOPs", "KV bytes"], rows, name)
    print(
        f"at {one.loops} loops and {one.seq_len} tokens of context; "
        f"training at a mean of {one.training_loops:.2f} loops, {one.training_grad_loops:.2f} with gradients; "
        f"decoding costs {flops(one.decode_flops_per_token)} FLOPs a token; "
        f"{one.effective_params:,} effective parameters (every loop counted)"
    )
    if len(one.kv_bytes_by_cache) > 1:
        kept = ", ".join(f"{name} {n:,}" for name, n in one.kv_bytes_by_cache.items())
        print(f"KV bytes a token by decode cache: {kept}")
    if one.latent_kv_bytes_per_token != one.kv_bytes_per_token:
        latent = one.latent_kv_bytes_per_token
        print(f"a cache of latents, expanded when they are read, would keep {latent:,} bytes a token")


def print_footprint(one: Any) -> None:
    """A `Footprint` as two tables, and its times in a line."""
    rows = [[t.name, gigabytes(t.bytes), gigabytes(t.bytes_at_max)] for t in one.memory]
    rows.append(["total", gigabytes(one.memory_bytes), gigabytes(one.memory_bytes_at_max)])
    title = f"memory of each of {one.ranks} ranks, GB ({one.parallel}, {one.dtype}, {one.rows} rows at a time)"
    depths = [f"at a mean of {one.mean_loops:.2f} loops", f"at the most, {one.max_loops}"]
    print_table(["training", *depths], rows, title)
    if one.traffic:
        sent = [[t.name, gigabytes(t.bytes)] for t in one.traffic]
        print_table(["a train step", "GB that a rank sends"], [*sent, ["total", gigabytes(one.traffic_bytes)]])
    words = [f"a train step is {flops(one.flops)} FLOPs"]
    if one.compute_s is not None:
        words.append(f"{one.compute_s:.3g} s of compute")
    if one.communication_s is not None and one.traffic:
        words.append(f"{one.communication_s:.3g} s of communication")
    if one.run_s is not None:
        words.append(f"{one.n_steps:,} steps take {days(one.run_s)}")
    print("; ".join(words))
    print(one.assumptions)


def print_bench(found: Any) -> None:
    """A `BenchResult` as a table, and what it was of."""
    rows = []
    for one in found.scores:
        drafts = f"{one.accepted / one.checked:.0%} of {one.checked:,}" if one.checked else ""
        same = {None: "", True: f"as {one.same_tokens_as}", False: f"NOT as {one.same_tokens_as}"}
        rows.append(
            [
                str(one.concurrency),
                one.mode,
                f"{one.tokens_per_s.median:,.1f}",
                times(one.ratio),
                f"{one.decode_tokens_per_s.median:,.1f}",
                times(one.decode_ratio),
                f"{one.bound:.2f}",
                f"{one.decode_of_bound:.0%}",
                f"{one.mean_loops:.2f}",
                f"{sum(one.launches.values()):,}",
                f"{one.mean_width.get('core', 0):.1f}",
                drafts,
                f"{one.overhead:.1%}",
                f"{one.cache_bytes / 1e6:,.1f}",
                same[one.tokens_identical],
            ]
        )
    head = ["at once", "mode", "tokens/s", "over fixed", "decoding", "over fixed", "bound", "of it", "loops"]
    head += ["launches", "width", "drafts right", "overhead", "cache MB", "tokens"]
    if all(one.tokens_identical is None for one in found.scores):
        head, rows = head[:-1], [row[:-1] for row in rows]
    machine = found.machine
    title = (
        f"{found.what}: prompts of {found.prompt_tokens} tokens and {found.tokens} new ones, {found.loops} loops, "
        f"depths {found.depths}: mean {found.mean_depth:.2f}; {machine['name']}, {machine['threads']} threads, "
        f"computed in {machine['dtype']}, attention {machine['attention']}"
    )
    print_table(head, rows, title, n_left=2)
    print(
        f"medians of {found.rounds} rounds [quartiles]; weights {found.weights_bytes / 1e6:,.1f} MB as loaded, "
        f"{found.held_bytes / 1e6:,.1f} MB with what the engine lays out of them in {machine['dtype']}; "
        f"the process at most {found.peak_memory_bytes / 1e6:,.0f} MB"
    )
    if machine["attention_reason"]:
        print(f"attention {machine['attention']}: {machine['attention_reason']}")
    if found.simulated:
        share = f"{found.acceptance:g}"
        print(f"random weights: tokens are scripted, and the share of drafts that are right, {share}, is simulated")


def times(ratio: Any) -> str:
    """A `Spread` of ratios."""
    return f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def print_capacity(found: Any) -> None:
    """A `CapacityResult` as a table, and its assumptions."""
    lengths = list(found.rooms[0].requests)
    head = ["cache", "coda keys", "bytes/token", "tokens", *(f"requests of {n:,}" for n in lengths)]
    rows = [
        [
            one.cache,
            one.coda_keys,
            f"{one.bytes_per_token:,}",
            f"{one.n_tokens:,}",
            *(f"{n:,}" for n in one.requests.values()),
        ]
        for one in found.rooms
    ]
    title = f"{found.what}: {found.memory_bytes:,} bytes, weights {found.weights_bytes:,}; decoded in {found.dtype}"
    print_table(head, rows, title, n_left=2)
    loops = f"{found.loops} loop{'s' if found.loops > 1 else ''}"
    print(
        f"at {loops}; a request is its prompt and its new tokens. Weights and cache alone are counted, weights once: a "
        "CPU's engine lays them out once more, where it is not loaded to decode only"
    )
    if found.page_tokens > 1:
        print(f"the cache is in pages of {found.page_tokens} tokens: a request takes whole pages")
    if found.keys == "anchor":
        print("keys anchor: all loops read one slot, so every cache is the same")


def gigabytes(n_bytes: int) -> str:
    """In 10^9 bytes, to 10 MB."""
    return f"{n_bytes / 1e9:,.2f}"


def days(seconds: float) -> str:
    """In the largest unit of which there is one."""
    for unit, size in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.1f} s"


def print_match(found: Any, recipes: Sequence[Path], settings: Sequence[str], as_json: bool) -> None:
    """A `MatchResult` as a table, and the settings that reproduce it."""
    if as_json:
        print_json({"recipe": str(recipes[0]), "target_recipe": str(recipes[1]), **found.to_json()})
        return
    rows = [
        [
            name,
            f"{side.value:,}",
            f"{side.ledger.params:,}",
            f"{side.ledger.effective_params:,}",
            flops(side.ledger.forward_flops_per_token),
            flops(side.ledger.training_flops_per_token),
            *([flops(side.cost)] if found.free == "tokens" else []),
        ]
        for name, side in (
            (f"{recipes[0]}, before", found.before),
            (f"{recipes[0]}, after", found.after),
            (f"{recipes[1]}", found.target),
        )
    ]
    header = ["a token", found.free, "params", "effective params", "forward FLOPs", "training FLOPs"]
    print_table(header + (["FLOPs of the run"] if found.free == "tokens" else []), rows)
    print(f"{found.compared}: {found.off_percent:+.3f}% of the second recipe's")
    print(" ".join(f"--set {shlex.quote(setting)}" for setting in (*settings, *found.settings)))


def print_recipes(found: Any) -> None:
    """A `Catalogue` as two tables."""
    rows = [
        [
            one.name,
            f"{one.params:,}",
            f"{one.effective_params:,}",
            flops(one.forward_flops_per_token),
            flops(one.training_flops_per_token),
            one.source,
        ]
        for one in found.recipes
    ]
    head = ["recipe", "params", "effective params", "forward FLOPs", "training FLOPs", "source"]
    print_table(head, rows, f"{found.folder} (FLOPs a token: forward at n_loops, training at the mean depth)")
    if found.overlays:
        print_table(["overlay", "what it changes"], [[one.name, one.description] for one in found.overlays])

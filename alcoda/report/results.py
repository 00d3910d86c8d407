"""The parts of the page with numbers: headline, training, bits per byte by depth, cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alcoda.report import curves, figures
from alcoda.report.markup import (
    MISSING,
    bits,
    count,
    details,
    duration,
    esc,
    exact,
    facts,
    figure,
    human,
    interval,
    note,
    number,
    quantity,
    section,
    table,
)
from alcoda.report.positions import positions
from alcoda.report.read import Evaluation, Gain, Ledger, Run

_ENOUGH_BITS = 0.002
_PART = "Scored on the beginning of the validation text only (eval.tokens); the evaluation by depth is on all of it."
_NO_EVALUATION = "No evaluation yet: run `alcoda eval RUN`."


def headline(runs: Sequence[Run]) -> str:
    """The head of the page: what the run is and its final numbers, or a table with a row a run."""
    if len(runs) == 1:
        run = runs[0]
        described = run.info.text("description")
        kicker = f'<p class="kicker">Training run <span class="status {esc(run.status)}">{esc(run.status)}</span></p>'
        text = f'<p class="lead">{esc(described)}</p>' if described else ""
        parts = [kicker, f"<h1>{esc(run.name)}</h1>", text, _final(run)]
    else:
        lead = '<p class="lead">Each at the depth that its model is built for (n_loops).</p>'
        parts = ['<p class="kicker">Comparison</p>', f"<h1>{len(runs)} runs compared</h1>", lead, _summary(runs)]
    if any(run.evaluation is None for run in runs):
        absent = [run.label for run in runs if run.evaluation is None]
        parts.append(note(_NO_EVALUATION if len(runs) == 1 else f"{', '.join(absent)}: {_NO_EVALUATION}"))
    return "<header>\n" + "\n".join(part for part in parts if part) + "\n</header>"


def _final(run: Run) -> str:
    items: list[tuple[str, str]] = []
    point = run.headline
    if point is not None:
        range_text = f" (95%: {interval(point.low, point.high)})" if point.low is not None else ""
        under = f"at {count(point.loops, 'loop')}{range_text}"
        items.append(("Bits per byte", f"<strong>{bits(point.bits_per_byte)}</strong><small>{esc(under)}</small>"))
    gain = _main_gain(run)
    if gain is not None:
        under = (
            f"bits per byte, {gain.from_loops} to {count(gain.to_loops, 'loop')} (95%: {interval(gain.low, gain.high)})"
        )
        words = bits(gain.bits_per_byte)
        items.append(("Saved by depth", f"<strong>{words}</strong><small>{esc(under)}</small>"))
    if run.ledger is not None:
        ledger = run.ledger
        under = f"unrolled to {count(ledger.loops, 'loop')}: {human(ledger.effective_params)}"
        items.append(("Parameters", f"<strong>{quantity(ledger.params)}</strong><small>{esc(under)}</small>"))
        flops = quantity(ledger.training_flops_per_token)
        items.append(("Training FLOPs per token", f"<strong>{flops}</strong><small>nominal</small>"))
    tokens = run.total("tokens", "tokens")
    if tokens is not None:
        train_step = run.total("train_step", "train_step")
        under = "" if train_step is None else f"in {exact(train_step)} train steps"
        items.append(("Tokens seen", f"<strong>{quantity(tokens)}</strong><small>{esc(under)}</small>"))
    wall_s = run.total("wall_s", "elapsed_s")
    if wall_s is not None:
        executed = run.total("executed_flops", "executed_flops")
        under = "" if executed is None else f"{human(executed, 'FLOP')} executed"
        items.append(("Training time", f"<strong>{esc(duration(wall_s))}</strong><small>{esc(under)}</small>"))
    return facts(items) if items else ""


def _main_gain(run: Run) -> Gain | None:
    gains = run.evaluation.gain if run.evaluation else ()
    point = run.headline
    best = [gain for gain in gains if point is not None and gain.to_loops == point.loops]
    return (best or list(gains) or [None])[0]


def _summary(runs: Sequence[Run]) -> str:
    head = [
        "Run",
        "Bits per byte",
        "95% interval",
        "At loops",
        "Parameters",
        "Training FLOPs per token",
        "Tokens seen",
        "Status",
    ]
    rows = []
    for index, run in enumerate(runs):
        point, ledger = run.headline, run.ledger
        described = esc(run.info.text("description"))
        rows.append(
            [
                swatch(index, run) + (f"<small>{described}</small>" if described else ""),
                f"<strong>{bits(point.bits_per_byte)}</strong>" if point else MISSING,
                interval(point.low, point.high) if point else MISSING,
                number(point.loops) if point else MISSING,
                quantity(ledger.params) if ledger else MISSING,
                quantity(ledger.training_flops_per_token) if ledger else MISSING,
                quantity(run.total("tokens", "tokens")),
                esc(run.status),
            ]
        )
    return table(head, rows, "Final numbers of each run")


def swatch(index: int, run: Run) -> str:
    """The label of a run after a dot in its colour."""
    return f'<span class="swatch series-{index % 8}" aria-hidden="true"></span>{esc(run.label)}'


def training(runs: Sequence[Run]) -> str:
    """Loss, validation, loops drawn and speed over training."""
    parts = [note(f"{run.label}: {text}" if len(runs) > 1 else text) for run in runs for text in run.notes]
    window = max((curves.smooth(run.curve.loss_N)[1] for run in runs), default=1)
    over = f"Line: centred mean over {window} logged steps; faint: as logged." if window > 1 else ""
    drawn = []
    loss = curves.loss_figure(runs)
    if loss:
        varied = any(len(set(run.curve.loops_N[np.isfinite(run.curve.loops_N)])) > 1 for run in runs)
        why = "Each train step draws its own number of loops, which adds to the noise." if varied else ""
        drawn.append(figure(loss, "Training loss", f"{over} {why}".strip()))
    for source in curves.sources(runs):
        svg = curves.valid_figure(runs, source)
        where = f"Validation on {source}"
        each = "Each run at the depth that it is built for."
        if svg:
            drawn.append(figure(svg, where, f"{'One line a depth.' if len(runs) == 1 else each} {_PART}"))
    loops = curves.loops_figure(runs)
    if loops:
        drawn.append(figure(loops, "Loops drawn in training", _drawn_from(runs)))
    speed = curves.speed_figure(runs)
    if speed:
        drawn.append(figure(speed, "Speed", over))
    if not drawn:
        parts.append(note("No training metrics yet: metrics.jsonl is missing or empty."))
    elif not curves.sources(runs):
        parts.append(note("No validation during training was logged."))
    grid = '<div class="grid">\n' + "\n".join(drawn) + "\n</div>" if drawn else ""
    return section("training", "Training", *parts, grid)


def _drawn_from(runs: Sequence[Run]) -> str:
    said: dict[str, list[str]] = {}  # runs that drew alike share the words
    for run in runs:
        depth = run.info.child("depth").plain()
        if depth:
            rest = ", ".join(f"{key} {value.removesuffix('.0')}" for key, value in depth.items() if key != "kind")
            said.setdefault(f"{depth.get('kind', 'depth')}{f' ({rest})' if rest else ''}", []).append(run.label)
    if len(said) == 1:
        return f"Drawn from: {esc(next(iter(said)))}. Dotted: mean."
    return esc("".join(f"{', '.join(labels)}: {text}. " for text, labels in said.items()) + "Dotted: mean.")


def depth(runs: Sequence[Run]) -> str:
    """Bits per byte against depth: figure, table, gains, and what was evaluated; and over the position in the row."""
    known = [(run, run.evaluation) for run in runs if run.evaluation]
    if not known:
        return section("depth", "Bits per byte by depth", note(_NO_EVALUATION))
    svg = figures.depth_figure(runs)
    means = "; the dotted line marks the mean depth of training" if any(run.mean_loops for run, _ in known) else ""
    caption = f"Lower is better. Bands: 95% bootstrap intervals{means}. Depths beyond those trained are extrapolation."
    drawn = figure(svg, "Bits per byte against loops", caption) if svg else note("No depth was evaluated.")
    gains = _gain_table(known)
    tables = _depth_table(known) + (gains if len(known) == 1 else "")
    beside = f'<div class="split">\n{drawn}\n<div>{tables}</div>\n</div>'
    below = gains if len(known) > 1 else ""
    return section(
        "depth", "Bits per byte by depth", *_evaluated(known), *_reading(known), beside, below, positions(runs)
    )


def _reading(known: Sequence[tuple[Run, Evaluation]]) -> list[str]:
    """What the numbers say, in a sentence a run; and whether runs may be compared at all."""
    said = []
    if len({(evaluation.data, evaluation.n_bytes) for _, evaluation in known}) > 1:
        said.append(note("These runs were evaluated on different texts: their bits per byte cannot be compared."))
    for run, evaluation in known:
        points = evaluation.by_depth
        if len(points) < 2:
            continue
        best = min(point.bits_per_byte for point in points)
        enough = next(point for point in points if point.bits_per_byte <= best + _ENOUGH_BITS)
        saved = points[0].bits_per_byte - best
        prefix = f"{run.label}: " if len(known) > 1 else ""
        text = f"Depth saves {bits(saved)} bits per byte over {count(points[0].loops, 'loop')}; "
        text += f"{count(enough.loops, 'loop')} come within {_ENOUGH_BITS:g} of the best."
        said.append(f"<p>{esc(prefix + text)}</p>")
    return said


def _evaluated(known: Sequence[tuple[Run, Evaluation]]) -> list[str]:
    said: dict[tuple[str, str], list[str]] = {}  # runs that were evaluated alike share a sentence
    for run, evaluation in known:
        what = (
            f"Evaluated on {evaluation.data}: {evaluation.n_units:,} {evaluation.unit}, "
            f"{evaluation.n_tokens:,} tokens, {evaluation.n_bytes:,} bytes. "
            f"Intervals resample the {evaluation.unit}; gains pair them."
            + (f" Rows were read by {evaluation.prefill} prefill." if evaluation.prefill else "")
        )
        said.setdefault((what, evaluation.note), []).append(run.label)
    parts = []
    for (what, remark), labels in said.items():
        prefix = f"{', '.join(labels)}: " if len(said) > 1 else ""
        parts.append(f"<p>{esc(prefix + what)}</p>")
        if remark:
            parts.append(note(prefix + remark))
    return parts


def _depth_table(known: Sequence[tuple[Run, Evaluation]]) -> str:
    depths = sorted({point.loops for _, evaluation in known for point in evaluation.by_depth})
    if not depths:
        return ""
    if len(known) == 1:
        run, evaluation = known[0]
        home = run.headline
        rows = []
        for point in evaluation.by_depth:
            mark = " <small>n_loops</small>" if point is home and point.loops == run.nominal_loops else ""
            rows.append(
                [
                    f"{point.loops}{mark}",
                    bits(point.bits_per_byte, 4),
                    interval(point.low, point.high, 4),
                    bits(point.loss, 4),
                ]
            )
        return table(["Loops", "Bits per byte", "95% interval", "Nats per token"], rows, "Results by depth")
    rows = []
    for loops in depths:
        cells = []
        for _, evaluation in known:
            point = next((point for point in evaluation.by_depth if point.loops == loops), None)
            under = f"<small>{interval(point.low, point.high)}</small>" if point else ""
            cells.append(f"{bits(point.bits_per_byte)}{under}" if point else MISSING)
        rows.append([str(loops), *cells])
    return table(["Loops", *(esc(run.label) for run, _ in known)], rows, "Bits per byte by depth, with 95% intervals")


def _gain_table(known: Sequence[tuple[Run, Evaluation]]) -> str:
    rows = []
    for run, evaluation in known:
        for gain in evaluation.gain:
            what = f"{gain.from_loops} to {count(gain.to_loops, 'loop')}"
            first = what if len(known) == 1 else f"{esc(run.label)}, {what}"
            rows.append([first, bits(gain.bits_per_byte, 4), interval(gain.low, gain.high, 4)])
    return table(["Depth", "Bits per byte saved", "95% interval"], rows, "Gain from depth") if rows else ""


def cost(runs: Sequence[Run]) -> str:
    """The cost ledger: totals, bars by term, and the tables by term."""
    known = [(run, run.ledger) for run in runs if run.ledger]
    if not known:
        return section("cost", "Cost", note("No cost ledger was recorded in run.json."))
    conventions = list(dict.fromkeys(ledger.convention for _, ledger in known if ledger.convention))
    parts = [f"<p>{esc(text)}</p>" for text in conventions]
    svg = figures.cost_figure(runs)
    drawn = figure(svg, "Forward FLOPs per token, by term") if svg else ""
    totals = _totals(known)
    if len(known) == 1:
        parts += [f'<div class="split">\n{drawn}\n<div>{totals}</div>\n</div>', _terms(known[0][1])]
    else:
        parts += [totals, drawn, *(details(f"Terms of {run.label}", _terms(ledger)) for run, ledger in known)]
    return section("cost", "Cost", *parts)


def _totals(known: Sequence[tuple[Run, Ledger]]) -> str:
    def both(value: float, unit: str = "") -> str:
        return f"{esc(human(value, unit))}<small>{esc(exact(value))}</small>"

    items = [
        ("Loops", [number(ledger.loops) for _, ledger in known]),
        ("Context (keys)", [exact(ledger.seq_len) for _, ledger in known]),
        ("Parameters", [both(ledger.params) for _, ledger in known]),
        ("Parameters, unrolled", [both(ledger.effective_params) for _, ledger in known]),
        ("Training FLOPs per token", [both(ledger.training_flops_per_token) for _, ledger in known]),
        ("Forward FLOPs per token", [both(ledger.forward_flops_per_token) for _, ledger in known]),
        ("Decode FLOPs per token", [both(ledger.decode_flops_per_token) for _, ledger in known]),
        ("KV cache per token", [both(ledger.kv_bytes_per_token, "B") for _, ledger in known]),
    ]
    head = ["Total", *(esc(run.label) if len(known) > 1 else "Value" for run, _ in known)]
    return table(head, [[name, *cells] for name, cells in items], "Totals of the cost ledger")


def _terms(ledger: Ledger) -> str:
    rows = [
        [
            f"<code>{esc(term.name).replace('.', '.<wbr>')}</code>",
            quantity(term.params),
            quantity(term.training_flops),
            quantity(term.forward_flops),
            quantity(term.kv_bytes, "B"),
        ]
        for term in ledger.terms
    ]
    rows.append(
        [
            "Total",
            quantity(ledger.params),
            quantity(ledger.training_flops_per_token),
            quantity(ledger.forward_flops_per_token),
            quantity(ledger.kv_bytes_per_token, "B"),
        ]
    )
    head = ["Term", "Parameters", "Training FLOPs per token", "Forward FLOPs per token", "KV bytes per token"]
    return table(head, rows, "Cost by term", total=True)

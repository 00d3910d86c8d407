"""The parts of the page that record the run: samples, config, and where it all came from."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from alcoda.report.fields import Fields
from alcoda.report.markup import MISSING, count, details, esc, human, note, number, quantity, section, table
from alcoda.report.read import Run, Sample

_PER_STEP = "_bytes_per_step"


def samples(runs: Sequence[Run]) -> str:
    """Samples side by side by depth, a row a prompt and run."""
    if not any(run.samples for run in runs):
        return section("samples", "Samples", note("No samples yet: the run folder has no `samples.json`."))
    parts = []
    for prompt in dict.fromkeys(sample.prompt for run in runs for sample in run.samples):
        parts.append(f"<h3>Prompt <code>{esc(prompt) or 'none'}</code></h3>")
        for run in runs:
            cards = sorted(
                (s for s in run.samples if s.prompt == prompt), key=lambda s: (s.loops, s.temperature, s.seed)
            )
            if cards and len(runs) > 1:
                parts.append(f"<h4>{esc(run.label)}</h4>")
            if cards:
                parts.append('<div class="samples">\n' + "\n".join(_card(card) for card in cards) + "\n</div>")
    return section("samples", "Samples", *parts)


def _card(sample: Sample) -> str:
    text = sample.text.removeprefix(sample.prompt)
    how = f"temperature {number(sample.temperature)}, seed {sample.seed}"
    # A newline right after <pre> would be dropped by the browser, so the text starts inside an element.
    return (
        f"<article><h5>{count(sample.loops, 'loop')} <small>{esc(how)}</small></h5>\n"
        f'<pre><span class="prompt">{esc(sample.prompt)}</span><span>{esc(text)}</span></pre></article>'
    )


def config(runs: Sequence[Run]) -> str:
    """The resolved recipe of each run, and for several what differs from the first."""
    parts = []
    first = runs[0]
    for run in runs[1:]:
        changed = _difference(first.recipe, run.recipe)
        what = f"{run.label} against {first.label}"
        parts.append(
            details(f"What differs: {what}", changed, opened=True) if changed else note(f"{what}: no difference.")
        )
    for run in runs:
        summary = "The resolved recipe" if len(runs) == 1 else f"The resolved recipe of {run.label}"
        parts.append(details(summary, f"<pre>{_lines(esc(run.recipe))}</pre>"))
    return section("config", "Config", *parts)


def _lines(text: str) -> str:
    return f"<span>{text}</span>"


def _difference(old: str, new: str) -> str:
    lines = []
    for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=2, lineterm=""):
        if line.startswith(("---", "+++")):
            continue
        tag = {"-": "del", "+": "ins", "@": "i"}.get(line[0])
        text = "…" if tag == "i" else esc(line)
        lines.append(f"<{tag}>{text}</{tag}>" if tag else text)
    return f'<pre class="diff">{_lines(chr(10).join(lines))}</pre>' if lines else ""


def provenance(runs: Sequence[Run]) -> str:
    """Versions, commit, seeds, machine, command and data: a column a run."""
    columns = [_facts(run) for run in runs]
    rows = [
        [esc(name), *(_value(facts.get(name)) for facts in columns)]
        for name in dict.fromkeys(name for facts in columns for name in facts)
    ]
    head = ["Item", *(esc(run.label) if len(runs) > 1 else "Value" for run in runs)]
    parts = [table(head, rows, "Provenance", numbers=False) if rows else note("run.json records no provenance.")]
    parts.append("<h3>Data</h3>")
    # Runs on the same data share one table.
    described: dict[str, list[str]] = {}
    for run in runs:
        described.setdefault(_data(run.info.child("data")), []).append(run.label)
    for body, labels in described.items():
        parts.append((f"<h4>{esc(', '.join(labels))}</h4>\n" if len(described) > 1 else "") + body)
    return section("provenance", "Provenance", *parts)


def _value(text: str | None) -> str:
    return MISSING if text is None else f'<span class="value">{esc(text)}</span>'


def _facts(run: Run) -> dict[str, str]:
    info = run.info
    items: list[tuple[str, str]] = [
        ("Run folder", run.folder),
        ("Created", info.text("created")),
        ("Status", run.status),
        ("Command", info.text("command")),
        ("Commit", _commit(info)),
        ("Started from", _start(info.child("init_from"))),
        *((f"plugin: {one.text('name')}", one.text("sha256")) for one in info.children("plugins")),
        *_named("", info.child("versions"), "version"),
        *_named("seed: ", info.child("seeds")),
        *_named("machine: ", info.child("machine")),
        *_parallel(info.child("parallel")),
    ]
    tokenizer = info.child("data").child("tokenizer")
    items += _named("tokenizer: ", tokenizer)
    return {_title(name): value for name, value in items if value}


def _named(prefix: str, fields: Fields, suffix: str = "") -> Iterable[tuple[str, str]]:
    return [(f"{prefix}{key.replace('_', ' ')} {suffix}".strip(), value) for key, value in fields.plain().items()]


def _parallel(fields: Fields) -> list[tuple[str, str]]:
    """The processes of a run, the most memory that each took, and what one of them sends in a train step."""
    if "processes" not in fields:
        return []
    n = fields.integer("processes")
    how = f", {fields.text('kind')} over {fields.text('backend')}, {count(fields.integer('hosts'), 'host')}"
    collectives = (key for key in fields.data if key.endswith(_PER_STEP))
    return [
        ("processes", f"{n}{how if n > 1 else ''}"),
        ("peak memory of each process", ", ".join(human(peak, "B") for peak in fields.numbers("peak_memory_bytes"))),
        *(
            (
                f"sent a step and process, {key.removesuffix(_PER_STEP).replace('_', '-')}",
                human(fields.number(key), "B"),
            )
            for key in collectives
        ),
    ]


def _title(name: str) -> str:
    return name[:1].upper() + name[1:]


def _commit(info: Fields) -> str:
    commit, dirty = info.text("commit"), info.flag("dirty")
    if not commit:
        return "unknown"
    return f"{commit} (with uncommitted changes)" if dirty else commit


def _start(start: Fields) -> str:
    if not start.data:
        return ""
    step, sha256 = start.integer("train_step"), start.text("sha256")
    return f"{start.text('run')}, train step {step:,} (weights sha256 {sha256})"


def _data(data: Fields) -> str:
    rows = []
    for source in data.children("sources"):
        weight = source.maybe_number("weight")
        splits = source.child("splits")
        for name in splits.data:
            split = splits.child(name)
            rows.append(
                [
                    f"{esc(source.text('name', '?'))}, {esc(name)}",
                    MISSING if weight is None else number(weight),
                    *(quantity(split.maybe_number(key)) for key in ("tokens", "documents", "bytes")),
                ]
            )
        if not splits.data:
            rows.append([esc(source.text("name", "?")), MISSING if weight is None else number(weight), *[MISSING] * 3])
    head = ["Source and split", "Weight", "Tokens", "Documents", "Bytes"]
    parts = [table(head, rows, "Data by source and split") if rows else note("run.json describes no data.")]
    notes = "".join(f"<li>{esc(text)}</li>" for text in data.texts("notes"))
    return "\n".join([*parts, f"<ul>{notes}</ul>" if notes else ""])

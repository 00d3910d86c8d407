// Small drawings: what a token went through, and where the loops went. Their colours are those of page.css.

import { el, number, percent, shade, small, svg } from "./dom.js";

const text = (x, y, words, more = {}) => svg("text", { x, y, ...more }, words);

// One number by loop on a logarithmic scale. values: [number or null], one a loop, the first of loop 1.
export function byLoop(title, unit, values, most, cut) {
  const width = 330, height = 118, left = 40, right = 10, top = 10, bottom = 22;
  const known = values.filter((x) => x !== null && x > 0);
  if (!known.length) return null;
  const all = cut === null ? known : [...known, cut];
  const low = Math.floor(Math.log10(Math.max(1e-9, Math.min(...all))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...all))));
  const x = (loop) => left + ((width - left - right) * (loop - 1)) / Math.max(1, most - 1);
  const y = (value) => top + ((height - top - bottom) * (high - Math.log10(Math.max(value, 10 ** low)))) / (high - low);
  const parts = [];
  const every = Math.ceil((high - low) / 3);
  for (let power = high; power >= low; power -= every) {
    const at = y(10 ** power);
    parts.push(svg("line", { x1: left, x2: width - right, y1: at, y2: at, class: "grid" }));
    parts.push(text(left - 6, at + 3.5, power >= -3 && power <= 3 ? String(10 ** power) : `1e${power}`, { class: "tick end" }));
  }
  const step = Math.ceil(most / 10);
  for (let loop = 1; loop <= most; loop += step) parts.push(text(x(loop), height - 6, String(loop), { class: "tick middle" }));
  if (cut !== null) {
    parts.push(svg("line", { x1: left, x2: width - right, y1: y(cut), y2: y(cut), class: "cut" }));
    parts.push(text(left + 3, y(cut) + 11, `leaves below ${small(cut)}`, { class: "tick cut-words" }));
  }
  const points = values.map((value, i) => [x(i + 1), value]).filter(([, value]) => value !== null);
  parts.push(svg("polyline", { points: points.map(([px, value]) => `${px},${y(value)}`).join(" "), class: "line" }));
  values.forEach((value, i) => {
    if (value === null) return;
    parts.push(svg("circle", { cx: x(i + 1), cy: y(value), r: 4, class: "dot", "data-shade": shade(i + 1, most) }));
  });
  const said = `${title}, ${unit}, by loop: ${values.map((value, i) => `${i + 1}: ${value === null ? "none" : small(value)}`).join(", ")}`;
  return el(
    "figure",
    { class: "by-loop" },
    el("figcaption", {}, el("strong", {}, title), ` ${unit}`),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said }, ...parts),
  );
}

// lanes: [{letter, label, counts: Map loops -> tokens}]; lab: of /page/lab.json, or null; room: pixels across.
export function histogram(lanes, lab, most, room) {
  const told = lanes.filter((lane) => lane.counts.size);
  const labShare = new Map((lab?.histogram ?? []).map((one) => [one.depth, (one.settled + one.censored) / lab.n_tokens]));
  const deepest = Math.max(most, ...told.flatMap((lane) => [...lane.counts.keys()]), ...[...labShare].filter(([, s]) => s >= 0.005).map(([d]) => d));
  const series = told.map((lane) => {
    const n = [...lane.counts.values()].reduce((a, b) => a + b, 0);
    return { ...lane, n, share: (loop) => (lane.counts.get(loop) ?? 0) / n };
  });
  const width = Math.max(300, Math.min(720, room)), height = 230, left = 44, right = 8, top = 12, bottom = 40;
  const loops = Array.from({ length: deepest }, (_, i) => i + 1);
  const peak = Math.max(0.1, ...loops.flatMap((loop) => [...series.map((one) => one.share(loop)), labShare.get(loop) ?? 0]));
  const ceiling = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1].find((x) => x >= peak - 1e-9);
  const slot = (width - left - right) / deepest;
  const y = (share) => top + (height - top - bottom) * (1 - share / ceiling);
  const parts = [];
  const over = [];
  for (const share of [0, ceiling / 2, ceiling]) {
    parts.push(svg("line", { x1: left, x2: width - right, y1: y(share), y2: y(share), class: "grid" }));
    parts.push(text(left - 7, y(share) + 4, percent(share), { class: "tick end" }));
  }
  const key = Math.min(22, slot - 3);
  const bar = Math.min(34, (slot * 0.72) / Math.max(1, series.length));
  for (const loop of loops) {
    const middle = left + slot * (loop - 0.5);
    series.forEach((one, i) => {
      const share = one.share(loop);
      const from = middle + bar * (i - series.length / 2);
      const more = { x: from + 1, y: y(share), width: bar - 2, height: Math.max(0, y(0) - y(share)), rx: 2 };
      if (share) parts.push(svg("rect", { ...more, class: `bar bar-${one.letter.toLowerCase()}`, "data-shade": shade(loop, most) }));
      if (share && series.length > 1) over.push(text(from + bar / 2, y(share) - 4, one.letter, { class: "tick middle over" }));
    });
    parts.push(svg("rect", { x: middle - key / 2, y: height - bottom + 7, width: key, height: 17, rx: 4, class: "key", "data-shade": shade(loop, most) }));
    parts.push(text(middle, height - bottom + 19.5, String(loop), { class: "key-words middle", "data-shade": shade(loop, most) }));
  }
  if (labShare.size) {
    const points = loops.map((loop) => [left + slot * (loop - 0.5), y(labShare.get(loop) ?? 0)]);
    parts.push(svg("polyline", { points: points.map((p) => p.join(",")).join(" "), class: "lab" }));
    for (const [px, py] of points) parts.push(svg("circle", { cx: px, cy: py, r: 3.4, class: "lab-dot" }));
  }
  parts.push(...over);
  parts.push(text(width - right, height - 3, "loops", { class: "tick end" }));
  return el(
    "div",
    { class: "histogram" },
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Share of tokens by loops; the numbers are in the table below" }, ...parts),
    keys(series, lab, labShare),
    table(loops, series, labShare),
  );
}

function keys(series, lab, labShare) {
  const found = series.map((one) =>
    el("li", { class: `key-${one.letter.toLowerCase()}` }, `This text${series.length > 1 ? `, ${one.letter}` : ""} (${one.label}): the loops that each of ${one.n} tokens ran`),
  );
  if (labShare.size) {
    const words = `The lab’s text (${lab.data}, ${number(lab.n_tokens, 0)} tokens): the loop from which on a prediction stays, KL below ${small(lab.eps)} nats`;
    found.push(el("li", { class: "key-lab" }, words));
  }
  return el("ul", { class: "keys" }, ...found);
}

function table(loops, series, labShare) {
  const head = el("tr", {}, el("th", { scope: "col" }, "Loops"), ...series.map((one) => el("th", { scope: "col" }, `This text, ${one.letter}`)), labShare.size ? el("th", { scope: "col" }, "The lab’s text") : null);
  const rows = loops.map((loop) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, String(loop)),
      ...series.map((one) => el("td", {}, `${one.counts.get(loop) ?? 0} (${percent(one.share(loop))})`)),
      labShare.size ? el("td", {}, percent(labShare.get(loop) ?? 0, 1)) : null,
    ),
  );
  return el("details", {}, el("summary", {}, "As a table"), el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

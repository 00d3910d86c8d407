// What one token went through, loop by loop: drawings and a table.

import { byLoop } from "./charts.js";
import { el, percent, plural, shade, small, visible } from "./dom.js";

const HEAD = "token-title";

export class TokenPanel {
  constructor(element, letGo) {
    this.element = element;
    this.letGo = letGo;
    this.rest();
  }

  rest() {
    this.element.classList.remove("open", "kept");
    this.element.replaceChildren(
      el("h2", { id: HEAD }, "A token’s way"),
      el("p", { class: "hint" }, "Point at a token of the text to see what each loop did to its prediction: how far it moved, how much the state changed, and which tokens were likeliest."),
    );
  }

  show(lane, at, alone, scale, kept) {
    const token = lane.tokens[at];
    const most = Math.max(lane.dial.most, token.loops);
    const shown = el("span", { class: "token big", "data-shade": shade(token.loops, scale) }, visible(token.text));
    const close = el("button", { type: "button", class: "quiet close" }, "Close ", el("kbd", {}, "Esc"));
    close.addEventListener("click", () => this.letGo());
    const parts = [
      el("div", { class: "panel-head" }, el("h2", { id: HEAD }, shown), close),
      el(
        "p",
        { class: "panel-facts" },
        el("strong", {}, plural(token.loops, "loop")),
        ` of at most ${most} · token ${at + 1}${alone ? "" : ` of ${lane.letter}`} · id ${token.id}`,
      ),
    ];
    if (token.steps?.length) parts.push(...this.way(token, lane.dial.cut, most, scale));
    else parts.push(el("p", { class: "hint" }, this.whyNot(at, token)));
    this.element.classList.add("open");
    this.element.classList.toggle("kept", kept);
    this.element.replaceChildren(...parts);
  }

  whyNot(at, token) {
    if (!token.steps) return "Trajectories were not kept: tick “Keep trajectories” and generate again.";
    if (at === 0) return "The first token is drawn from the prompt’s last one, which is read with the prompt: no trajectory is kept of it.";
    return "No trajectory was kept of this token.";
  }

  way(token, cut, most, scale) {
    const of = (rule) => (cut?.rule === rule ? cut.at : null);
    const drawings = [
      byLoop("Prediction moved", "KL to the loop before, nats", token.steps.map((step) => step.kl), most, of("kl")),
      byLoop("State changed", "relative to its size", token.steps.map((step) => step.state_change), most, of("state")),
    ];
    return [el("div", { class: "drawings" }, ...drawings), this.table(token, scale)];
  }

  table(token, scale) {
    const columns = Math.min(3, Math.max(...token.steps.map((step) => step.top.length)));
    const head = ["Loop", ...Array.from({ length: columns }, (_, i) => (i ? `${i + 1}.` : "Likeliest"))];
    const rows = token.steps.map((step, i) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, el("span", { class: "key", "data-shade": shade(i + 1, scale) }, String(i + 1)), el("span", { class: "sr" }, ` KL ${small(step.kl)}, state change ${small(step.state_change)}`)),
        ...step.top.slice(0, columns).map(([text, logprob]) =>
          el("td", { class: text === token.text ? "drawn" : null }, el("span", { class: "word" }, visible(text)), el("small", {}, percent(Math.exp(logprob)))),
        ),
      ),
    );
    return el(
      "table",
      { class: "likeliest" },
      el("caption", {}, "Likeliest tokens after each loop", el("small", {}, " bold: the one that was drawn")),
      el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, ...rows),
    );
  }
}

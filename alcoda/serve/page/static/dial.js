// The depth dial: a tier, a fixed number of loops, or a threshold of one's own, on one slider from shallow to deep.

import { el, number, percent, plural, small } from "./dom.js";

const RULES = {
  state: { name: "state change", from: 0.5, to: 0.002, said: (x) => `a loop changes the state by less than ${percent(x, x < 0.01 ? 2 : 1)}` },
  kl: { name: "KL", from: 0.3, to: 0.00001, said: (x) => `a loop moves the prediction by less than ${small(x)} nats of KL` },
};
const STEPS = 100;

const capital = (name) => name.charAt(0).toUpperCase() + name.slice(1);

export class Dial {
  // model: {tiers: [name], loops, most}; facts: of /page/lab.json, by tier.
  constructor(letter, model, facts, start) {
    Object.assign(this, { letter, model, facts });
    const id = letter.toLowerCase();
    this.way = start.way;
    this.places = {
      tier: Math.max(0, model.tiers.indexOf(start.tier)),
      fixed: start.loops ?? model.loops,
      threshold: this.startingPoint(),
    };
    this.rule = "state";
    this.slider = el("input", { type: "range", id: `depth-${id}`, "aria-labelledby": `dial-${id}-name` });
    this.big = el("output", { class: "dial-value", for: `depth-${id}` });
    this.note = el("p", { class: "dial-note" });
    this.ticks = el("div", { class: "ticks", "aria-hidden": "true" });
    this.ruleChoice = el(
      "select",
      { id: `rule-${id}`, "aria-label": `What the threshold of depth ${letter} is of` },
      ...Object.entries(RULES).map(([value, rule]) => el("option", { value }, rule.name)),
    );
    const ways = [...(model.tiers.length ? [["tier", "Tier"]] : []), ["fixed", "Fixed"], ["threshold", "Threshold"]];
    if (model.most <= 1) ways.splice(ways.length - 1, 1);
    const segments = ways.map(([value, words]) => {
      const radio = el("input", { type: "radio", name: `way-${id}`, value });
      radio.checked = value === this.way;
      radio.addEventListener("change", () => this.turnTo(value));
      return el("label", {}, radio, el("span", {}, words));
    });
    this.element = el(
      "div",
      { class: "dial", role: "group", "aria-labelledby": `dial-${id}-name` },
      el(
        "div",
        { class: "dial-head" },
        el("p", { class: "dial-name", id: `dial-${id}-name` }, "Depth", el("span", { class: "letter" }, ` ${letter}`)),
        el("div", { class: "segments", role: "radiogroup", "aria-label": `How depth ${letter} is chosen` }, ...segments),
        this.ruleChoice,
      ),
      this.big,
      this.slider,
      this.ticks,
      this.note,
    );
    this.slider.addEventListener("input", () => {
      this.places[this.way] = Number(this.slider.value);
      this.tell();
    });
    this.ruleChoice.addEventListener("change", () => {
      this.rule = this.ruleChoice.value;
      this.tell();
    });
    this.turnTo(this.way);
  }

  // The threshold of the calibrated tier in the middle, where it is of the same rule.
  startingPoint() {
    const rule = this.facts.balanced?.rule;
    if (rule?.kind !== "state" || typeof rule.threshold !== "number") return STEPS / 2;
    const { from, to } = RULES.state;
    const place = Math.round((STEPS * Math.log(rule.threshold / from)) / Math.log(to / from));
    return Math.max(0, Math.min(STEPS, place));
  }

  turnTo(way) {
    this.way = way;
    const [low, high] = { tier: [0, this.model.tiers.length - 1], fixed: [1, this.model.most], threshold: [0, STEPS] }[way];
    Object.assign(this.slider, { min: low, max: high, step: 1 });
    this.slider.value = this.places[way];
    this.ruleChoice.hidden = way !== "threshold";
    let names = ["shallow", "deep"];
    if (way === "tier") names = this.model.tiers.map(capital);
    if (way === "fixed") names = high <= 12 ? Array.from({ length: high }, (_, i) => String(i + 1)) : ["1", String(high)];
    this.ticks.replaceChildren(...names.map((name) => el("span", {}, name)));
    this.ticks.classList.toggle("alone", names.length === 1);
    this.tell();
  }

  get threshold() {
    const { from, to } = RULES[this.rule];
    return Number((from * (to / from) ** (this.places.threshold / STEPS)).toPrecision(3));
  }

  get tier() {
    return this.model.tiers[this.places.tier];
  }

  // A short name, for the lane.
  get label() {
    if (this.way === "tier") return capital(this.tier);
    if (this.way === "fixed") return plural(this.places.fixed, "loop");
    return `${RULES[this.rule].name} < ${small(this.threshold)}`;
  }

  // What a request says of depth.
  get request() {
    if (this.way === "tier") return { exit: this.tier };
    if (this.way === "fixed") return { loops: this.places.fixed, exit: "none" };
    return { exit: { rule: this.rule, threshold: this.threshold } };
  }

  // The threshold that a loop's state change or KL has to fall below; null where there is none of one number.
  get cut() {
    if (this.way === "threshold") return { rule: this.rule, at: this.threshold };
    const rule = this.way === "tier" ? this.facts[this.tier]?.rule : null;
    return rule && typeof rule.threshold === "number" ? { rule: rule.kind, at: rule.threshold } : null;
  }

  // The most loops that a token may run.
  get most() {
    return this.way === "fixed" ? this.places.fixed : this.model.loops;
  }

  tell() {
    this.big.textContent = this.label;
    this.note.textContent = this.words();
    this.slider.setAttribute("aria-valuetext", `${this.label}: ${this.note.textContent}`);
    this.element.dispatchEvent(new CustomEvent("turned", { bubbles: true }));
  }

  words() {
    if (this.way === "fixed") {
      const n = this.places.fixed;
      if (n === this.model.loops) return "Every token runs them all: the model's full depth.";
      return `Every token runs ${plural(n, "loop")}, ${n < this.model.loops ? "less" : "more"} than the full depth of ${this.model.loops}.`;
    }
    if (this.way === "threshold") return `A token leaves the loop as soon as ${RULES[this.rule].said(this.threshold)}.`;
    const found = this.facts[this.tier];
    if (!found) return "As it was calibrated.";
    if (found.mean_loops >= this.model.loops) return `Every token runs all ${plural(this.model.loops, "loop")}.`;
    const cost = found.tolerance === 0 ? "nothing lost" : `at most ${percent(found.tolerance, 1)} of the loss`;
    return `About ${number(found.mean_loops)} of ${this.model.loops} loops a token where it was calibrated, ${cost}.`;
  }
}

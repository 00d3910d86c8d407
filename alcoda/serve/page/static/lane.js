// One text as it is written: its tokens in colour, what it took, and a way through the tokens by mouse and keyboard.

import { el, number, percent, plural, seconds, shade, visible } from "./dom.js";

export class Lane {
  // shown(lane, index, kept): a token is looked at; kept: until it is let go.
  constructor(letter, shown) {
    Object.assign(this, { letter, shown });
    this.turns = []; // of a chat, all that was said before
    const id = `lane-${letter.toLowerCase()}`;
    this.name = el("h3", { id });
    this.state = el("span", { class: "lane-state" });
    this.prompt = el("span", { class: "prompt" });
    this.list = el("ol", { class: "tokens", role: "list", "aria-label": `Tokens of text ${letter}` });
    this.plain = el("p", { class: "sr" });
    this.stats = el("dl", { class: "stats" });
    this.history = el("div", { class: "turns" });
    this.body = el("div", { class: "text" }, this.prompt, this.list);
    this.element = el(
      "article",
      { class: "lane card", "aria-labelledby": id },
      el("div", { class: "lane-head" }, this.name, this.state),
      this.history,
      this.body,
      this.plain,
      this.stats,
    );
    this.list.addEventListener("pointerover", (event) => this.point(event, false));
    this.list.addEventListener("click", (event) => this.point(event, true));
    this.list.addEventListener("focusin", (event) => this.point(event, false));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.empty();
  }

  empty() {
    Object.assign(this, { tokens: [], counts: new Map(), finish: null, summary: null, usage: null });
    Object.assign(this, { startedAt: null, firstAt: null, lastAt: null, dial: null });
    this.list.replaceChildren();
    this.stats.replaceChildren();
    this.prompt.textContent = "";
    this.plain.textContent = "";
    this.state.textContent = "";
    this.element.classList.remove("compared");
  }

  begin(dial, prompt, alone) {
    this.empty();
    this.dial = { label: dial.label, cut: dial.cut, most: dial.most, tier: dial.way === "tier" ? dial.tier : null };
    this.name.replaceChildren(...(alone ? [] : [el("span", { class: "letter" }, this.letter), " "]), dial.label);
    this.prompt.textContent = prompt;
    this.startedAt = performance.now();
    this.say("waiting");
    this.element.setAttribute("aria-busy", "true");
  }

  say(words) {
    this.state.textContent = words;
    this.element.dataset.state = words;
  }

  // One event of the stream.
  take(event, scale) {
    const now = performance.now();
    const choice = event.choices?.[0];
    const found = choice?.alcoda?.tokens ?? [];
    if (found.length) {
      this.firstAt ??= now;
      this.lastAt = now;
      this.say("writing");
    }
    for (const token of found) this.add(token, scale);
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (event.alcoda) this.summary = event.alcoda;
    if (event.usage) this.usage = event.usage;
    if (found.length) this.tell(now);
  }

  add(token, scale) {
    this.tokens.push(token);
    this.counts.set(token.loops, (this.counts.get(token.loops) ?? 0) + 1);
    const words = `${visible(token.text)}, ${plural(token.loops, "loop")}`;
    const button = el("span", { class: "token", role: "button", tabindex: this.tokens.length === 1 ? 0 : -1, "aria-label": words, title: words });
    button.dataset.at = this.tokens.length - 1;
    button.dataset.loops = token.loops;
    button.dataset.shade = shade(token.loops, scale);
    // The space before a word goes where its line breaks; other white space is kept as it is.
    button.classList.toggle("word", /^ \S+$/.test(token.text));
    // A line break has no ground to colour: a sign stands for it.
    button.textContent = token.text === "" ? "·" : token.text.replaceAll("\n", "⏎\n");
    this.list.append(el("li", {}, button));
  }

  recolour(scale) {
    for (const button of this.buttons) button.dataset.shade = shade(Number(button.dataset.loops), scale);
  }

  get buttons() {
    return this.list.querySelectorAll(".token");
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  get loops() {
    return this.tokens.reduce((sum, token) => sum + token.loops, 0);
  }

  end(how) {
    const words = { stop: "ended", length: "reached its length" };
    this.say(how ?? words[this.finish] ?? "done");
    const used = this.summary?.tier;
    // Under load a server may answer less deep than it was asked, and says so.
    if (used && this.dial.tier && used !== this.dial.tier) this.say(`${this.state.textContent}; the server chose ${used}`);
    this.element.removeAttribute("aria-busy");
    this.plain.textContent = this.tokens.length ? `Whole text: ${this.text}` : "";
    this.tell(performance.now());
  }

  tell(now) {
    const n = this.tokens.length;
    const took = now - this.startedAt;
    const whole = this.usage?.completion_tokens_details?.full_depth_loops;
    const writing = this.lastAt - this.firstAt;
    const rows = [
      ["Tokens", String(n)],
      ["Mean loops", n ? number(this.loops / n, 2) : "–"],
      ["Loops used", number(this.loops, 0), whole ? `${percent(this.loops / whole)} of full depth` : ""],
      ["Time", seconds(took)],
      ["To the first", this.firstAt === null ? "–" : seconds(this.firstAt - this.startedAt)],
      ["Tokens/s", n > 1 && writing > 0 ? number((1000 * (n - 1)) / writing, 0) : "–"],
    ];
    this.stats.replaceChildren(...rows.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null))));
  }

  // A chat goes on: what was said becomes part of what lies before.
  remember(question) {
    this.turns.push({ role: "user", content: question }, { role: "assistant", content: this.text });
  }

  showTurns() {
    this.history.replaceChildren(...this.turns.map((turn) => el("p", { class: `turn ${turn.role}` }, el("span", { class: "who" }, turn.role === "user" ? "You" : "Model"), turn.content)));
  }

  // Marks what the other text does not have.
  mark(indexes) {
    this.element.classList.add("compared");
    this.buttons.forEach((button, i) => {
      const other = indexes.has(i);
      button.classList.toggle("other", other);
      const token = this.tokens[i];
      const words = `${visible(token.text)}, ${plural(token.loops, "loop")}${other ? ", differs" : ""}`;
      button.setAttribute("aria-label", words);
      button.title = words;
    });
  }

  point(event, kept) {
    const button = event.target.closest(".token");
    if (!button) return;
    const at = Number(button.dataset.at);
    if (event.type === "focusin") this.rove(at, false);
    this.shown(this, at, kept);
  }

  rove(at, focus = true) {
    const buttons = this.buttons;
    const to = buttons[Math.max(0, Math.min(buttons.length - 1, at))];
    if (!to) return;
    this.list.querySelector('[tabindex="0"]')?.setAttribute("tabindex", -1);
    to.setAttribute("tabindex", 0);
    if (focus) to.focus();
  }

  key(event) {
    const button = event.target.closest(".token");
    if (!button || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Number(button.dataset.at);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: this.line(at, 1), ArrowUp: this.line(at, -1), Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to !== undefined) this.rove(to);
    else if (event.key === "Enter" || event.key === " ") this.shown(this, at, true);
    else return;
    event.preventDefault();
  }

  // The token nearest below or above on the screen.
  line(at, way) {
    const buttons = [...this.buttons];
    const middle = (box) => (box.left + box.right) / 2;
    const from = buttons[at].getBoundingClientRect();
    let best = at;
    let least = Infinity;
    for (let i = at + way; i >= 0 && i < buttons.length; i += way) {
      const box = buttons[i].getBoundingClientRect();
      const down = way * (box.top - from.top);
      if (down < from.height / 2) continue;
      if (down > 3 * from.height) break;
      const far = 10 * down + Math.abs(middle(box) - middle(from));
      if (far < least) [best, least] = [i, far];
    }
    return best;
  }

  // Which token is kept in view; -1: none.
  press(at) {
    this.buttons.forEach((button, i) => {
      if (i === at) button.setAttribute("aria-pressed", "true");
      else button.removeAttribute("aria-pressed");
    });
  }
}

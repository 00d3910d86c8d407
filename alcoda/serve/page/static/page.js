// The page: asks the server for one text or for two at different depths, and shows where the loops went.

import { getJson, keepKey, stream, wayOut } from "./api.js";
import { histogram } from "./charts.js";
import { Dial } from "./dial.js";
import { differing } from "./diff.js";
import { SHADES, byId, el, number, percent, plural, seconds } from "./dom.js";
import { Lane } from "./lane.js";
import { TokenPanel } from "./token.js";

const RETRY_MS = 700;
const NARROW = matchMedia("(max-width: 59.99rem)");
const MOST_RETRIES = 90; // a minute: the port is open before the model is loaded

const state = { model: null, lab: null, note: null, dials: [], lanes: [], kept: null, running: null };
const panel = new TokenPanel(byId("token"), () => letGo());
const chatting = () => !byId("kind").hidden && byId("ask").elements.kind.value === "chat";
const comparing = () => byId("compare").checked;
const inUse = () => state.lanes.slice(0, comparing() ? 2 : 1);
// The deepest loop that a colour stands for.
const scale = () => {
  const n = comparing() ? 2 : 1;
  return Math.max(state.model.loops, ...[...state.dials.slice(0, n), ...state.lanes.slice(0, n).map((lane) => lane.dial)].map((dial) => dial?.most ?? 0));
};

function tellProblem(problem) {
  const box = byId("problem");
  box.hidden = !problem;
  box.textContent = "";
  if (!problem) return;
  const wanted = problem.status === 401;
  if (wanted) byId("key-form").hidden = false;
  box.append(el("strong", {}, problem.message), " ", wayOut(problem));
  if (wanted) byId("key").focus();
}

// What the server serves, once it has loaded it.
async function findModel() {
  for (let tries = 0; ; tries += 1) {
    try {
      return await getJson("v1/models");
    } catch (problem) {
      if (problem.status !== 503 || tries >= MOST_RETRIES) throw problem;
      byId("model").textContent = "The model is being loaded …";
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }
}

async function start() {
  tellProblem(null);
  try {
    const { data } = await findModel();
    const base = data.find((one) => !one.id.includes(":")) ?? data[0];
    const about = base.alcoda ?? {};
    const named = data.filter((one) => one.id.startsWith(`${base.id}:`)).map((one) => one.alcoda?.tier ?? one.id.split(":").pop());
    const run = await getJson("page/lab.json");
    const loops = about.n_loops ?? 1;
    state.model = { id: base.id, tiers: named.length > 1 ? byDepth(named, run.tiers) : [], tier: about.tier, loops, most: Math.min(about.max_loops ?? 2 * loops, 2 * loops), context: about.context };
    state.lab = run.lab;
    state.note = run.note;
    byId("model").replaceChildren(el("strong", {}, base.id), ` · ${plural(loops, "loop")}`, about.context ? ` · context ${number(about.context, 0)}` : "");
    document.title = `${base.id} · alcoda`;
    // So many that a prompt has room beside them.
    const room = byId("max-tokens");
    if (about.context && room.value === room.defaultValue) room.value = Math.max(1, Math.min(room.value, Math.floor(0.375 * about.context)));
    byId("kind").hidden = !about.is_chat;
    if (about.is_chat) byId("ask").elements.kind.value = "chat";
    showExamples(run.examples);
    makeDials(run.tiers);
    byId("key-form").hidden = true;
    turnKind();
  } catch (problem) {
    byId("model").textContent = "No model";
    tellProblem(problem);
  }
}

const byDepth = (tiers, facts) => tiers.toSorted((a, b) => (facts[a]?.mean_loops ?? 0) - (facts[b]?.mean_loops ?? 0));

function showExamples(prompts) {
  const box = byId("examples");
  box.hidden = !prompts.length;
  box.replaceChildren(
    ...prompts.map((prompt) => {
      const button = el("button", { type: "button", class: "quiet" }, prompt);
      button.addEventListener("click", () => {
        byId("prompt").value = prompt;
        byId("prompt").focus();
      });
      return button;
    }),
  );
}

function makeDials(facts) {
  const { tiers, tier, loops } = state.model;
  const start = tiers.length ? { way: "tier", tier: tier ?? tiers[0] } : { way: "fixed", loops };
  const other = tiers.length ? { way: "tier", tier: tiers.at(-1) } : { way: "fixed", loops: Math.max(1, Math.round(loops / 2)) };
  state.dials = [new Dial("A", state.model, facts, start), new Dial("B", state.model, facts, other)];
  byId("dials").replaceChildren(...state.dials.map((dial) => dial.element));
  state.lanes = ["A", "B"].map((letter) => new Lane(letter, look));
  byId("lanes").replaceChildren(...state.lanes.map((lane) => lane.element));
  turnCompare();
}

function turnCompare() {
  const both = comparing();
  document.body.classList.toggle("comparing", both);
  if (!state.dials.length) return;
  state.dials[1].element.hidden = !both;
  state.lanes[1].element.hidden = !both || !state.lanes[1].dial;
  state.lanes[0].element.hidden = !state.lanes[0].dial;
  byId("verdict").hidden = true;
  letGo(false);
  tellScale();
  showHistogram();
  showCurl();
}

function turnKind() {
  const chat = chatting();
  byId("prompt-label").textContent = chat ? "Message" : "Prompt";
  byId("new-chat").hidden = !chat;
  byId("examples").classList.toggle("away", chat);
  if (chat && byId("prompt").value === byId("prompt").defaultValue) byId("prompt").value = "";
  showCurl();
}

function tellScale() {
  const most = scale();
  const box = byId("legend");
  box.setAttribute("aria-label", `Colours: loops that a token ran, 1 to ${most}, shallow to deep`);
  const shades = Array.from({ length: Math.min(most, SHADES) }, (_, i) => (most <= SHADES ? Math.round(((SHADES - 1) * i) / Math.max(1, most - 1)) : i));
  box.replaceChildren("1", ...shades.map((n) => el("span", { class: "key", "data-shade": n })), `${most} loops`);
  for (const lane of state.lanes) lane.recolour(most);
}

function showHistogram() {
  const lanes = inUse().map((lane) => ({ letter: lane.letter, label: lane.dial?.label ?? "", counts: lane.counts }));
  const box = byId("histogram");
  const open = box.querySelector("details")?.open ?? false;
  const any = lanes.some((lane) => lane.counts.size);
  box.hidden = !any && !state.lab;
  if (box.hidden) return;
  box.replaceChildren(el("figcaption", {}, el("h2", {}, "Where the loops went")), histogram(lanes, state.lab, scale(), box.clientWidth - 40), state.note ? el("p", { class: "hint" }, state.note) : "");
  box.querySelector("details").open = open;
}

function body(dial, lane) {
  const value = (id) => Number(byId(id).value);
  const shared = {
    model: state.model.id,
    max_tokens: value("max-tokens"),
    temperature: value("temperature"),
    top_p: value("top-p"),
    seed: value("seed"),
    ...dial.request,
    stream: true,
    stream_options: { include_usage: true },
    [byId("trajectories").checked ? "return_trajectory" : "return_loops"]: true,
  };
  const prompt = byId("prompt").value;
  if (!chatting()) return { path: "v1/completions", body: { prompt, ...shared } };
  return { path: "v1/chat/completions", body: { messages: [...lane.turns, { role: "user", content: prompt }], ...shared } };
}

function showCurl() {
  if (!state.dials.length) return;
  const key = sessionStorage.getItem("alcoda-key") ? " \\\n  -H \"Authorization: Bearer $ALCODA_API_KEY\"" : "";
  const commands = inUse().map((lane, i) => {
    const asked = body(state.dials[i], lane);
    const data = JSON.stringify(asked.body, null, 1).replaceAll("'", "'\\''");
    return `curl -N ${new URL(asked.path, document.baseURI)}${key} \\\n  -H 'Content-Type: application/json' -d '${data}'`;
  });
  byId("curl").textContent = commands.join("\n\n");
}

function setRunning(controller) {
  state.running = controller;
  const stop = byId("stop");
  if (!controller && document.activeElement === stop) byId("generate").focus();
  stop.disabled = !controller;
  byId("generate").setAttribute("aria-disabled", String(Boolean(controller)));
  document.body.classList.toggle("running", Boolean(controller));
}

async function generate() {
  if (!state.model || state.running || !byId("ask").reportValidity()) return;
  const controller = new AbortController();
  setRunning(controller);
  tellProblem(null);
  letGo(false);
  byId("verdict").hidden = true;
  const chat = chatting();
  const question = byId("prompt").value;
  const lanes = inUse();
  lanes.forEach((lane) => lane.empty());
  // A second depth joins a chat where the first one stands.
  if (chat && lanes.length > 1 && !lanes[1].turns.length) lanes[1].turns = [...lanes[0].turns];
  // One after the other: each has the machine to itself, so that their times compare.
  const asked = lanes.map((lane, i) => ({ lane, dial: state.dials[i], ...body(state.dials[i], lane) }));
  let how = null;
  try {
    for (const { lane, dial, path, body } of asked) {
      byId("status").textContent = `Writing: ${dial.label} …`;
      lane.element.hidden = false;
      lane.showTurns();
      lane.begin(dial, question, lanes.length === 1);
      lane.body.classList.toggle("chat", chat);
      try {
        for await (const event of stream(path, body, controller.signal)) {
          lane.take(event, scale());
          showHistogram();
        }
        lane.end();
      } catch (error) {
        lane.end(error.name === "AbortError" ? "stopped" : "failed");
        throw error;
      }
    }
    if (chat) {
      // All together, or none: a question that is asked again stands once in each.
      for (const lane of lanes) lane.remember(question);
      byId("prompt").value = "";
    }
  } catch (error) {
    how = error.name === "AbortError" ? "Stopped" : "Failed";
    if (how === "Failed") tellProblem(error);
  }
  setRunning(null);
  showHistogram();
  compare(lanes);
  byId("status").textContent = how === "Failed" ? "" : `${how ?? "Done"}: ${lanes.filter((lane) => lane.dial).map(spoken).join("; ")}.`;
}

function spoken(lane) {
  const n = lane.tokens.length;
  return `${plural(n, "token")}${n ? `, ${number(lane.loops / n)} loops each` : ""}, ${seconds((lane.lastAt ?? performance.now()) - lane.startedAt)}`;
}

function compare(lanes) {
  if (lanes.length < 2 || !lanes.every((lane) => lane.tokens.length)) return;
  const [a, b] = lanes;
  const found = differing(a.tokens.map((token) => token.id), b.tokens.map((token) => token.id));
  a.mark(found.a);
  b.mark(found.b);
  const mean = (lane) => lane.loops / lane.tokens.length;
  const [less, more] = mean(a) <= mean(b) ? [a, b] : [b, a];
  const saved = 1 - mean(less) / mean(more);
  const loops = saved < 0.005 ? "Both ran as many loops a token." : `${less.letter} (${less.dial.label}) ran ${percent(saved)} fewer loops a token than ${more.letter} (${more.dial.label}).`;
  const texts = found.a.size || found.b.size ? `The first ${plural(found.same, "token")} ${found.same === 1 ? "is" : "are"} the same; ${found.a.size} of A and ${found.b.size} of B are underlined: the other text does not have them.` : "The texts are the same, token by token.";
  byId("verdict").textContent = `${loops} ${texts}`;
  byId("verdict").hidden = false;
}

// A token is pointed at, or kept.
function look(lane, at, kept) {
  const focused = lane.buttons[at] === document.activeElement;
  if (!kept && !focused && (state.kept || NARROW.matches)) return;
  if (kept || (focused && state.kept)) {
    state.kept?.lane.press(-1);
    state.kept = { lane, at };
    lane.press(at);
  }
  panel.show(lane, at, !comparing(), scale(), Boolean(state.kept));
  // On a narrow screen the sheet comes up over the text.
  if (kept || focused) lane.buttons[at].scrollIntoView({ block: "nearest" });
}

function letGo(back = true) {
  const kept = state.kept;
  state.kept = null;
  kept?.lane.press(-1);
  // Focus goes back before the panel is emptied: it shows the token again.
  if (back && kept && byId("token").contains(document.activeElement)) kept.lane.rove(kept.at);
  panel.rest();
}

function wire() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      generate();
    }
  });
  byId("ask").addEventListener("input", showCurl);
  byId("dials").addEventListener("turned", () => {
    if (!state.lanes.length) return;
    tellScale();
    showCurl();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(byId("key").value);
    byId("key").value = "";
    start();
  });
  byId("stop").addEventListener("click", () => state.running?.abort());
  byId("compare").addEventListener("change", turnCompare);
  byId("kind").addEventListener("change", turnKind);
  byId("digits").addEventListener("change", () => document.body.classList.toggle("digits", byId("digits").checked));
  byId("new-chat").addEventListener("click", () => {
    for (const lane of state.lanes) {
      lane.turns = [];
      lane.showTurns();
      lane.empty();
    }
    turnCompare();
    byId("prompt").focus();
  });
  let drawn = innerWidth;
  addEventListener("resize", () => {
    if (state.model && innerWidth !== drawn) showHistogram();
    drawn = innerWidth;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") letGo();
  });
}

wire();
start();

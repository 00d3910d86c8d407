// Speaks to the server: JSON, streams of events, errors that say the way out, and the API key of this tab.

const KEY = "alcoda-key";

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export class Problem extends Error {
  constructor(message, status = 0, code = null, retryAfter = null) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running? Start it again (alcoda serve), then generate.");
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

async function problemOf(answer) {
  let said = {};
  try {
    said = (await answer.json()).error ?? {};
  } catch {
    // No envelope: something between the page and the server answered.
  }
  const retryAfter = Number(answer.headers.get("Retry-After")) || null;
  return new Problem(said.message || `The server answered ${answer.status}.`, answer.status, said.code ?? null, retryAfter);
}

export async function getJson(path) {
  return (await ask(path, { cache: "no-store" })).json();
}

// The events of a streamed answer, each parsed; ends with [DONE].
export async function* stream(path, body, signal) {
  const answer = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The connection broke off before the text was whole. Generate again.");
    }
    if (part.done) throw new Problem("The answer ended before it was whole. Generate again.");
    held += part.value.replaceAll("\r\n", "\n");
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Problem(found.error.message, 0, found.error.code ?? null);
      yield found;
    }
  }
}

// What to do about a problem, in words; empty where the server's message says it.
export function wayOut(problem) {
  if (problem.status === 401) return "Give the key that the server was started with.";
  if (problem.status === 429) return `Many are waiting. Try again${problem.retryAfter ? ` in ${problem.retryAfter} s` : " in a moment"}.`;
  if (problem.status === 503) return "The server is loading its model, or about to stop. Try again in a moment.";
  return "";
}

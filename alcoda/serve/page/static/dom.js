// Elements without markup: text is only ever text, so that nothing a model writes becomes part of the page.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const number = (x, digits = 1) =>
  x === null || x === undefined || Number.isNaN(x) ? "–" : x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const percent = (x, digits = 0) => `${number(100 * x, digits)} %`;
export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${number(ms / 1000, 2)} s`);
export const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// Small numbers as people write them: 0.31, 4.1e-5.
export function small(x) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  return Math.abs(x) >= 1e-4 ? String(Number(x.toPrecision(2))) : x.toExponential(1);
}

// White space that would not be seen, as signs.
export const visible = (text) => (text === "" ? "␀" : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣"));

export const SHADES = 16;
// The shade of page.css, 0 to 15, of a token that ran so many loops of at most so many.
export const shade = (loops, most) => (most <= 1 ? 0 : Math.round(((SHADES - 1) * (Math.min(loops, most) - 1)) / (most - 1)));

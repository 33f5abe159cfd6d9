// Elements and numbers.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const svg = (tag, attributes = {}, ...children) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// A name that may wrap after punctuation, but not within a word.
export const breakable = (name) => name.split(/(?<=[,/_-])/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));

export const $ = (id) => document.getElementById(id);

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en").replace("-", "−");
  if (size < 1e-3 || size >= 1e9) return String(Number(value.toPrecision(Math.min(3, digits))).toExponential()).replace("e+", "e").replaceAll("-", "−");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

export const count = (many, what) => `${number(many)} ${what}${many === 1 ? "" : "s"}`;

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "not finite";
  if (value === 0) return "0 %";
  const hundred = value * 100;
  return `${Math.abs(hundred) < 0.01 ? number(hundred, 2) : String(Number(hundred.toPrecision(3)))} %`;
}

export function bytes(value) {
  const [scale, unit] = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]].find(([scale]) => Math.abs(value) >= scale) ?? [1, "B"];
  return Number.isFinite(value) ? `${number(value / scale, 3)} ${unit}` : number(value);
}

export const show = (value, panel) => (panel.scale === "fraction" ? percent(value) : panel.unit === "B" ? bytes(value) : number(value));

export function duration(seconds) {
  if (seconds < 0.9995) return `${number(seconds * 1000, 3)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(timestamp) {
  const seconds = Math.max(0, Date.now() / 1000 - timestamp);
  if (seconds < 90) return "just now";
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

// A table that creates rows when they come into view, so that ten thousand steps cost as much as twenty.
export function virtualTable(headings, count, cells, { height = 200, start = "end", label = "" } = {}) {
  const ROW = 24;
  const body = h("tbody");
  const above = h("tr", { "aria-hidden": "true" });
  const below = h("tr", { "aria-hidden": "true" });
  const table = h("table", { class: "data", "aria-rowcount": count, "aria-label": label },
    h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))), body);
  const box = h("div", { class: "scroll", style: { height: `${height}px` }, tabindex: "0", role: "region", "aria-label": `${label}, table` }, table);
  const render = () => {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 8);
    const last = Math.min(count, first + Math.ceil(box.clientHeight / ROW) + 20);
    above.style.height = `${first * ROW}px`;
    below.style.height = `${(count - last) * ROW}px`;
    const rows = [];
    for (let row = first; row < last; row++) {
      rows.push(h("tr", { "aria-rowindex": row + 1 }, cells(row).map((text, column) => h(column ? "td" : "th", column ? {} : { scope: "row" }, text))));
    }
    body.replaceChildren(above, ...rows, below);
  };
  box.addEventListener("scroll", render);
  requestAnimationFrame(() => {
    render();
    if (start === "end") box.scrollTop = count * ROW;
  });
  return box;
}

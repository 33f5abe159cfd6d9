// State of the page: chosen runs, view, colours. It is kept in the address, so that a page can be bookmarked or sent.

export const state = {
  runs: new Map(), // id -> overview, in the server's order
  chosen: [], // ids, in the order chosen: it decides their colour and dash
  smooth: Number(localStorage.getItem("rlloop-smooth") ?? 0),
  range: null, // [first, last] step of all charts; null: all
  tables: false, // every chart as a table
  search: "",
  drawn: 0, // views begun. What comes back for an earlier one is left out, or it would overwrite the page
};

// Okabe and Ito's palette, safe for colour blindness; lighter colours on a dark page. Further lines differ by dashes.
const COLOURS = {
  light: ["#0072b2", "#d55e00", "#008262", "#b4568d", "#b27f00", "#6a51a3", "#4d4d4d", "#2f8fc4"],
  dark: ["#58b4ee", "#f08a4b", "#3cc79e", "#e39cc4", "#e9b949", "#b7a3e8", "#c9c9c9", "#9ad4f5"],
};
const DASHES = [[], [8, 4], [2, 3], [9, 3, 2, 3]];

export const theme = () => document.documentElement.dataset.theme;
export const look = (index) => ({
  colour: COLOURS[theme()][index % COLOURS.light.length],
  dash: DASHES[(index + Math.floor(index / COLOURS.light.length)) % DASHES.length], // 32 pairs before one comes again
});
export const lookOf = (run) => look(Math.max(0, state.chosen.indexOf(run)));

// One metric: runs differ in colour and dash. One run: metrics do. Both: colour is the run's, dash the metric's.
export function lookOfSeries(run, metric, metrics) {
  if (metrics.length === 1) return lookOf(run);
  if (state.chosen.length === 1) return look(metrics.indexOf(metric));
  return { colour: lookOf(run).colour, dash: look(metrics.indexOf(metric)).dash };
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// The last part of its path, unless another chosen run ends alike.
export function shortName(run) {
  const last = run.slice(run.lastIndexOf("/") + 1);
  if (run === ".") return "this run";
  return state.chosen.some((other) => other !== run && other.endsWith(`/${last}`)) ? run : last;
}

// A run's name in a legend: of `arm=a,seed=0` beside `arm=a,seed=1`, the part that differs.
export function briefName(run) {
  const parts = (id) => shortName(id).split(",");
  const others = state.chosen.filter((other) => other !== run).map(parts);
  const own = parts(run).filter((part) => !others.every((other) => other.includes(part)));
  return own.length ? own.join(",") : shortName(run);
}

export function route() {
  const [path, query = ""] = location.hash.replace(/^#\//, "").split("?");
  return { view: path || "charts", query: new URLSearchParams(query) };
}

export function address(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const run of state.chosen) query.append("run", run);
  for (const [name, value] of Object.entries(parameters)) if (value !== undefined && value !== null && value !== "") query.set(name, value);
  return `#/${view}?${query}`;
}

export const go = (view, parameters) => { location.hash = address(view, parameters); };

// [x, y] of a run's metric, without steps that lack it. Infinity is kept, since it is drawn.
export function points(column, smooth = 0) {
  const xs = [], ys = [], raw = [];
  let mean = 0, weight = 0;
  for (let row = 0; row < column.steps.length; row++) {
    const value = column.values[row];
    if (Number.isNaN(value)) continue;
    xs.push(column.steps[row]);
    raw.push(value);
    if (!Number.isFinite(value)) { ys.push(null); continue; }
    mean = smooth * mean + (1 - smooth) * value;
    weight = smooth * weight + (1 - smooth);
    ys.push(mean / weight);
  }
  return { xs, ys, raw };
}

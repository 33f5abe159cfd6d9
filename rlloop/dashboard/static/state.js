// State of the page: chosen runs, view, settings, colours. It is kept in the address, so that a page can be bookmarked or sent.

export const state = {
  runs: new Map(), // id -> overview, in the server's order
  chosen: [], // ids, in the order chosen: it decides their colour and dash
  smooth: Number(localStorage.getItem("rlloop-smooth") ?? 0),
  axis: "step", // or time, tokens: what charts are drawn over
  range: null, // [first, last] of all charts, on that axis; null: all
  pin: [], hide: [], move: [], log: [], // panels, by slug: at the top, left out, in an order of one's own, on another scale
  parity: "", // open or closed: whether parity's panels are shown; "": where a token differs
  tables: false, // every chart as a table
  search: "",
  drawn: 0, // views begun. What comes back for an earlier one is left out, or it would overwrite the page
};

// ---------------------------------------------------------------------------------------------- colours

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
  if (metrics.length < 2) return lookOf(run);
  if (state.chosen.length === 1) return look(metrics.indexOf(metric));
  return { colour: lookOf(run).colour, dash: look(metrics.indexOf(metric)).dash };
}

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---------------------------------------------------------------------------------------------- names

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

export const slug = (panel) => panel.title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");

// ---------------------------------------------------------------------------------------------- address

export function route() {
  const [path, query = ""] = location.hash.replace(/^#\//, "").split("?");
  return { view: path || "charts", query: new URLSearchParams(query) };
}

const AXES = ["step", "time", "tokens"];
const LISTS = ["pin", "hide", "move", "log"];
const SETTINGS = ["smooth", "axis", "zoom", "parity", ...LISTS];

// Take the settings of a link. What it does not name is at its default.
export function readSettings(query) {
  const smooth = Number(query.get("smooth") ?? NaN);
  if (smooth >= 0 && smooth < 1) state.smooth = smooth;
  state.axis = AXES.includes(query.get("axis")) ? query.get("axis") : "step";
  const zoom = (query.get("zoom") ?? "").split("~").map(Number);
  state.range = query.has("zoom") && zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null;
  for (const name of LISTS) state[name] = (query.get(name) ?? "").split(",").filter(Boolean);
  state.parity = ["open", "closed"].includes(query.get("parity")) ? query.get("parity") : "";
}

export function address(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const run of state.chosen) query.append("run", run);
  const settings = { smooth: state.smooth || "", axis: state.axis === "step" ? "" : state.axis, zoom: state.range?.map((value) => Number(value.toPrecision(8))).join("~"), parity: state.parity };
  for (const name of LISTS) settings[name] = state[name].join(",");
  for (const [name, value] of Object.entries({ ...parameters, ...settings })) if (value !== undefined && value !== null && value !== "") query.set(name, value);
  return `#/${view}?${query}`;
}

export const go = (view, parameters) => { location.hash = address(view, parameters); };

// Put the settings into the page's own link, without another entry in the browser's history.
export function remember() {
  localStorage.setItem("rlloop-smooth", state.smooth);
  const { view, query } = route();
  const rest = Object.fromEntries([...query].filter(([name]) => name !== "run" && !SETTINGS.includes(name)));
  history.replaceState(null, "", address(view, rest));
  dispatchEvent(new Event("remembered"));
}

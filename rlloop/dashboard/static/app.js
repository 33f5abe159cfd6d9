// Entry point: the list of runs, views by address, live events, keyboard.

import { $, ago, breakable, h, number } from "./dom.js";
import { get, listen } from "./api.js";
import { swatch, setRange } from "./chart.js";
import { closeMenu } from "./menu.js";
import { cardOf, leaveCharts, refreshCharts, showCharts, toggleTables } from "./charts.js";
import { address, go, look, readSettings, route, state } from "./state.js";
import { keyOfRollouts, refreshRollouts, showRollouts } from "./rollouts.js";
import { showStep } from "./step.js";
import { showTraining } from "./training.js";
import { refreshCertificate, showCertificate, showConfig } from "./records.js";

const VIEWS = { charts: showCharts, rollouts: showRollouts, step: showStep, certificate: showCertificate, config: showConfig, training: showTraining };
const REFRESH = { charts: refreshCharts, rollouts: refreshRollouts, step: refreshRollouts, certificate: refreshCertificate };
const FEW = 4; // runs that are told apart at a glance
let drawn = "";
let listed = ""; // the runs as the list shows them: notes are saved into state.runs before the server tells of them

async function draw(force = false) {
  const { view, query } = route();
  const named = query.getAll("run").filter((run) => state.runs.has(run));
  if (query.has("run")) { state.chosen = named; readSettings(query); }
  const now = JSON.stringify([location.hash, state.chosen]);
  if (now === drawn && !force) return;
  drawn = now;
  closeMenu();
  listRuns();
  markTabs();
  if (view !== "charts") leaveCharts();
  const mine = ++state.drawn;
  document.title = `rlloop · ${view === "step" ? `step ${query.get("step")}` : view}`;
  try {
    await (VIEWS[view] ?? showCharts)($("main"), query);
  } catch (error) {
    if (mine === state.drawn) $("main").replaceChildren(h("div", { class: "empty" }, h("h2", {}, "This cannot be shown"), h("p", {}, error.message)));
  }
}

function markTabs() {
  const { view } = route();
  for (const tab of document.querySelectorAll("#tabs a")) {
    const current = tab.dataset.view === view || (view === "step" && tab.dataset.view === "rollouts");
    if (current) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
    tab.href = address(tab.dataset.view);
  }
}

const STATUS = { live: "live", finished: "finished", stopped: "stopped", "parity broken": "bad", failed: "bad" };

// Runs that pass the filter; those in no folder first, since folders have headings.
const found = () => [...state.runs.values()].filter((run) => [run.id, run.status, run.note, ...run.tags].join(" ").toLowerCase().includes($("filter").value.toLowerCase()))
  .sort((a, b) => a.id.includes("/") - b.id.includes("/"));

function listRuns() {
  listed = JSON.stringify([...state.runs]);
  let folder = "";
  $("runs-toggle").textContent = `Runs: ${state.chosen.length} of ${state.runs.size} shown`;
  $("runs").replaceChildren(...found().flatMap((run) => {
    const parent = run.id.includes("/") ? run.id.slice(0, run.id.lastIndexOf("/")) : "";
    const heading = parent === folder ? [] : [h("li", { class: "folder" }, parent)];
    folder = parent;
    const order = state.chosen.indexOf(run.id);
    const { colour, dash } = look(Math.max(0, order));
    const share = run.num_steps ? Math.min(100, (100 * run.step) / run.num_steps) : 0;
    return [...heading, h("li", {}, h("label", { title: `${run.id}, last record ${ago(run.changed)}` },
      h("input", { type: "checkbox", checked: order >= 0, value: run.id, onchange: () => choose(state.chosen.includes(run.id) ? state.chosen.filter((id) => id !== run.id) : [...state.chosen, run.id]) }),
      order >= 0 ? swatch(colour, dash) : h("span"),
      h("span", { class: "name" }, run.id === "." ? "this run" : breakable(run.id.slice(run.id.lastIndexOf("/") + 1))),
      h("span", { class: "sub" }, h("i", { class: `dot ${run.problems.length ? "bad" : STATUS[run.status] ?? ""}` }),
        `${run.problems.length ? "damaged, " : ""}${run.status}${run.status === "finished" ? `, ${number(run.step)} steps` : ` at ${number(run.step)}${run.num_steps ? ` of ${number(run.num_steps)}` : ""}`}`),
      run.tags.length ? h("span", { class: "tags" }, run.tags.map((tag) => h("span", { class: "tag" }, tag))) : null,
      run.num_steps && run.status === "live" ? h("span", { class: "bar" }, h("i", { style: { width: `${share}%` } })) : null),
      h("button", { type: "button", class: "only", title: "This run alone", "aria-label": `Show ${run.id} alone`, onclick: () => choose([run.id]) }, "only"))];
  }));
}

function choose(ids) {
  state.chosen = ids;
  const { view, query } = route();
  go(VIEWS[view] ? view : "charts", view === "step" ? { of: query.get("of"), step: query.get("step") } : {});
  if (!state.chosen.length) draw(true);
}

function setRuns(overviews) {
  state.runs = new Map(overviews.map((run) => [run.id, run]));
  state.chosen = state.chosen.filter((run) => state.runs.has(run));
}

function announce({ runs, ids }) {
  const none = !state.runs.size;
  const all = new Map([...state.runs.values(), ...runs].map((run) => [run.id, run]));
  state.runs = new Map(ids.filter((id) => all.has(id)).map((id) => [id, all.get(id)]));
  const gone = state.chosen.filter((run) => !state.runs.has(run));
  if (gone.length) state.chosen = state.chosen.filter((run) => state.runs.has(run));
  if (JSON.stringify([...state.runs]) !== listed) listRuns();
  if (none && state.runs.size) { chooseFirst(); draw(true); return; }
  if (gone.length) draw(true);
  else if (runs.length) REFRESH[route().view]?.(runs.map((run) => run.id));
}

// Runs chosen at first: all if they are few, else the live ones, else the one that ran last. One that was refused before
// its first step is chosen only where there is no other.
function chooseFirst() {
  const begun = [...state.runs.values()].filter((run) => run.begun || run.status === "live");
  const all = begun.length ? begun : [...state.runs.values()];
  const live = all.filter((run) => run.status === "live");
  const last = all.reduce((newest, run) => (!newest || run.changed > newest.changed ? run : newest), null);
  const chosen = all.length <= FEW ? all : live.length ? live.slice(0, FEW) : [last];
  state.chosen = chosen.map((run) => run.id);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("rlloop-theme", theme);
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  listRuns();
  draw(true);
}
const otherTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function key(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input[type=search], input[type=text], select, textarea");
  if (typing) { if (event.key === "Escape") event.target.blur(); return; }
  if (document.querySelector("dialog[open]")) return;
  const view = route().view;
  const views = { 1: "charts", 2: "rollouts", 3: "certificate", 4: "config", ...($("training-tab").hidden ? {} : { 5: "training" }) };
  if (views[event.key]) go(views[event.key]);
  else if (event.key === "/") document.querySelector("#find")?.focus();
  else if (event.key === "d") otherTheme();
  else if (event.key === "?") $("help").showModal();
  else if (event.key === "r") setRange(null);
  else if (event.key === "t" && view === "charts" && !cardOf(event.target)) toggleTables();
  else if (event.key === "Escape" && view !== "charts") go("charts");
  else if (!keyOfRollouts(event)) return;
  event.preventDefault();
}

async function start() {
  const { runs, note, api } = await get("runs");
  setRuns(runs);
  $("training-tab").hidden = !api;
  if (api && !runs.length && !location.hash) history.replaceState(null, "", "#/training");
  $("note").textContent = note;
  $("theme").textContent = document.documentElement.dataset.theme === "dark" ? "Light" : "Dark";
  $("theme").addEventListener("click", otherTheme);
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("runs-toggle").addEventListener("click", () => $("runs-toggle").setAttribute("aria-expanded", String($("runs-toggle").getAttribute("aria-expanded") !== "true")));
  $("filter").addEventListener("input", listRuns);
  $("choose-all").addEventListener("click", () => choose([...new Set([...state.chosen, ...found().map((run) => run.id)])]));
  $("choose-none").addEventListener("click", () => choose(state.chosen.filter((id) => !found().some((run) => run.id === id))));
  addEventListener("keydown", key);
  addEventListener("hashchange", () => draw());
  addEventListener("remembered", () => { drawn = JSON.stringify([location.hash, state.chosen]); markTabs(); });
  chooseFirst();
  await draw(true);
  listen({
    runs: (found) => announce({ runs: found, ids: found.map((run) => run.id) }),
    changed: announce,
    state: (connected) => {
      $("connection").textContent = connected ? "" : "The dashboard's server does not answer; what is shown may be old.";
      $("connection").classList.toggle("warn", !connected);
    },
  });
}

start().catch((error) => $("main").replaceChildren(h("div", { class: "empty" }, h("h2", {}, "The dashboard could not start"), h("p", {}, error.message))));

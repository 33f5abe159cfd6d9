// The view of all panels: results at the top, then one card for each panel.

import { $, breakable, duration, h, number, percent, show, virtualTable } from "./dom.js";
import { get, link, load } from "./api.js";
import { Chart, seriesOf, setRange, swatch } from "./chart.js";
import { Histogram } from "./histogram.js";
import { go, lookOf, shortName, state } from "./state.js";

const STACKS = 4; // runs whose stacks are shown
let cards = [];
let strip, problems, layout;
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const card = cards.find((each) => each.element === entry.target);
    if (card) { card.visible = entry.isIntersecting; if (card.visible && card.stale) card.refresh(); }
  }
}, { rootMargin: "250px" });

export async function showCharts(main) {
  leaveCharts();
  if (!state.chosen.length) { main.replaceChildren(nothing()); return; }
  const mine = state.drawn;
  const sections = await get("panels", { run: state.chosen });
  if (mine !== state.drawn) return;
  layout = JSON.stringify(sections);
  strip = h("div", { class: "strip", "aria-label": "What came out" });
  problems = h("div");
  const groups = sections.map((section) => h("section", { class: "group" }, h("h2", {}, section.title),
    h("div", { class: "grid" }, section.panels.flatMap(byRun).map((panel) => {
      const card = new Card(panel);
      cards.push(card);
      return card.element;
    }))));
  main.replaceChildren(strip, problems, ...(groups.length ? [tools(), ...groups] : [h("div", { class: "empty" }, h("p", {}, "No step is recorded yet. The first one appears here by itself."))]));
  for (const card of cards) seen.observe(card.element);
  filter();
  await refreshStrip();
}

// Lines of several runs share a panel; each run's stack has its own.
const byRun = (panel) => (panel.kind === "stack" ? state.chosen.slice(0, STACKS).map((run) => ({ ...panel, run })) : [panel]);

export function leaveCharts() {
  for (const card of cards) { seen.unobserve(card.element); card.destroy(); }
  cards = [];
}

export async function refreshCharts(runs) {
  if (!runs.some((run) => state.chosen.includes(run))) return;
  const mine = state.drawn;
  const now = JSON.stringify(await get("panels", { run: state.chosen }));
  if (mine !== state.drawn) return;
  if (now !== layout) { // a metric that was not there before
    const main = $("main"), top = main.scrollTop;
    await showCharts(main);
    main.scrollTop = top;
    return;
  }
  for (const card of cards) { card.stale = true; if (card.visible) card.refresh(); }
  if (strip?.isConnected) refreshStrip();
}

export const cardOf = (element) => cards.find((card) => card.element.contains(element));
export function toggleTables() {
  state.tables = !state.tables;
  for (const card of cards) card.setTable(state.tables);
}

function nothing() {
  return state.runs.size
    ? h("div", { class: "empty" }, h("h2", {}, "No run is chosen"), h("p", {}, "Choose one or several at the left; they are drawn over one another."))
    : h("div", { class: "empty" }, h("h2", {}, "No runs yet"), h("p", {}, "A run appears here as soon as it starts: ",
        h("code", {}, "rlloop train --config-name countdown"), ". To look around without one: ", h("code", {}, "rlloop dashboard --demo"), "."));
}

function tools() {
  const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "Smoothing", oninput: (event) => {
    state.smooth = Number(event.target.value);
    localStorage.setItem("rlloop-smooth", state.smooth);
    for (const card of cards) { card.stale = true; if (card.visible) card.refresh(); }
  } });
  return h("div", { class: "tools" },
    h("input", { type: "search", id: "find", placeholder: "Find a metric  ( / )", "aria-label": "Find a metric", value: state.search, oninput: (event) => { state.search = event.target.value; filter(); } }),
    h("label", {}, "Smoothing", smooth),
    h("button", { type: "button", onclick: () => setRange(null) }, "All steps"),
    h("button", { type: "button", onclick: toggleTables }, "Tables"),
    h("span", {}, "Click a chart to open the step."));
}

function filter() {
  const wanted = state.search.toLowerCase();
  for (const card of cards) card.element.hidden = ![card.panel.title, ...card.panel.metrics].some((text) => text.toLowerCase().includes(wanted));
  for (const group of document.querySelectorAll("section.group")) group.hidden = !group.querySelector(".card:not([hidden])");
}

async function refreshStrip() {
  const all = await Promise.all(state.chosen.map((run) => get("totals", { run }).catch((error) => ({ id: run, error: String(error.message) }))));
  strip.replaceChildren(...all.map(row));
  strip.classList.toggle("many", all.length > 3);
  const found = all.flatMap((run) => (run.error ? [`${run.id}: ${run.error}`] : run.problems.map((text) => `${shortName(run.id)}: ${text}`)));
  problems.replaceChildren(found.length ? h("div", { class: "problems", role: "alert" }, found.slice(0, 6).map((text) => h("p", {}, text)),
    found.length > 6 ? h("p", { class: "muted" }, `and ${found.length - 6} more`) : null) : "");
}

function row(run) {
  const look = lookOf(run.id);
  const cell = (label, value, note) => h("div", { class: "cell", title: [note].flat().filter((part) => typeof part === "string").join(" ") }, h("span", { class: "label" }, label), h("span", { class: "value" }, value, value === "–" ? null : h("small", {}, note)));
  const course = (label, found) => cell(label, found ? number(found.last, 3) : "–", found ? [`from ${number(found.first, 3)},`, h("br"), `best ${number(found.best, 3)}`] : null);
  if (run.error) return h("div", { class: "row" }, h("div", { class: "who" }, swatch(look.colour, look.dash), h("b", {}, breakable(run.id))));
  const zero = run.tokens > 0 && run.different === 0;
  return h("div", { class: "row" },
    h("div", { class: "who" }, swatch(look.colour, look.dash), h("div", {}, h("b", {}, breakable(shortName(run.id))),
      h("div", { class: "muted" }, `${run.status}${run.mode ? `, ${run.mode}` : ""}`))),
    cell("Train-inference KL", run.k3_max === null ? "–" : zero ? h("span", { class: "good" }, "exactly 0") : number(run.k3_max, 3), zero ? "every bit equal" : "largest k3 of a step"),
    cell("Tokens that differ", run.tokens ? number(run.different) : "–", `of ${number(run.tokens)}`),
    course("pass@1, held-out", run.pass),
    course("Reward", run.reward),
    cell("Tokens discarded", run.discarded === null ? "–" : percent(run.discarded), "on average"),
    cell("Steps", number(run.steps), [run.num_steps ? `of ${number(run.num_steps)}` : "", run.seconds ? duration(run.seconds) : ""].filter(Boolean).join(", ")));
}

class Card {
  constructor(panel, { height = 168 } = {}) {
    Object.assign(this, { panel, height, stale: true, visible: false, table: state.tables });
    this.chips = h("div", { class: "chips", "aria-live": "off" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `${panel.title}: ${panel.about} Arrow keys move, Enter opens the step, t shows the table.`, style: { minHeight: `${height}px` } });
    this.tableButton = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.setTable(!this.table) }, "Table");
    this.download = h("a", { href: "#", download: "", title: "All steps of the chosen runs" }, "CSV");
    this.element = h("article", { class: "card", "data-panel": panel.title },
      h("header", {}, h("h3", { title: panel.about }, panel.title), h("span", { class: "unit" }, [panel.unit, panel.run && state.chosen.length > 1 ? `of ${shortName(panel.run)}` : ""].filter(Boolean).join(", ")),
        h("div", { class: "actions" }, this.tableButton, this.download, height < 300 ? h("button", { type: "button", onclick: () => this.enlarge() }, "Enlarge") : null)),
      this.chips, this.plot);
    const options = { height, onvalues: (step, values) => this.values(step, values), onstep: (run, step) => go("step", { of: run, step }) };
    this.chart = panel.kind === "histogram" ? new Histogram(this.plot, panel, options) : new Chart(this.plot, panel, options);
    this.plot.addEventListener("keydown", (event) => this.key(event));
  }

  destroy() { this.chart.destroy(); }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) this.chart.move(event.shiftKey ? by * 10 : by);
    else if (event.key === "Enter") this.chart.openStep();
    else if (event.key === "+" || event.key === "-") this.chart.zoom?.(event.key === "+" ? 0.5 : 2);
    else if (event.key === "e") this.enlarge();
    else if (event.key === "t") { this.setTable(!this.table); this.plot.focus(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  async refresh() {
    this.stale = false;
    const names = this.panel.kind === "histogram" ? ["parity/tokens"] : [...this.panel.metrics, ...(this.panel.kind === "stack" ? ["time/step"] : [])];
    try {
      await Promise.all((this.panel.run ? [this.panel.run] : state.chosen).map((run) => load(run, names)));
    } catch (error) {
      this.plot.replaceChildren(h("p", { class: "bad" }, error.message));
      return;
    }
    if (!this.plot.isConnected) return;
    this.download.href = link("series.csv", { run: this.panel.run ?? state.chosen, name: this.panel.metrics });
    if (this.table) this.drawTable();
    else await this.chart.draw();
  }

  setTable(table) {
    if (this.table === table && this.tableButton.getAttribute("aria-pressed") === String(table)) return;
    this.table = table;
    this.tableButton.setAttribute("aria-pressed", String(table));
    this.tableButton.textContent = table ? "Chart" : "Table";
    this.plot.replaceChildren();
    if (this.chart.plot) { this.chart.plot.destroy(); this.chart.plot = null; }
    this.stale = true;
    if (this.visible || this.height > 300) this.refresh();
  }

  async drawTable() {
    if (this.panel.kind === "histogram") {
      await this.chart.draw();
      const found = this.chart.found;
      if (!found.length) return;
      const { edges } = found[0];
      const name = (index) => (index === 0 ? `below ${number(edges[0])}` : index === edges.length ? `from ${number(edges[index - 1])}` : `${number(edges[index - 1])} to ${number(edges[index])}`);
      this.plot.replaceChildren(virtualTable(["d", ...found.map((each) => `${shortName(each.run)}, step ${each.step}`)], edges.length + 1,
        (index) => [name(index), ...found.map((each) => number(each.counts[index]))], { height: this.height, start: "top", label: this.panel.title }));
      return;
    }
    const series = seriesOf(this.panel);
    const tables = uPlot.join(series.map((line) => [line.xs, line.raw]));
    this.plot.replaceChildren(virtualTable(["step", ...series.map((line) => line.label || line.metric)], tables[0].length,
      (index) => [number(tables[0][index]), ...series.map((_, column) => show(tables[column + 1][index] ?? NaN, this.panel))], { height: this.height, label: this.panel.title }));
    this.values(null, series.map((line) => ({ ...line, value: line.raw[line.raw.length - 1] })));
  }

  values(step, values) {
    const at = step === null ? null : h("span", { class: "chip" }, `step ${number(step)}`);
    const few = values.slice(0, this.height > 300 ? 40 : this.panel.run ? 10 : 6);
    this.chips.replaceChildren(...[at, ...few.map((line) => h("span", { class: "chip" },
      values.length > 1 || state.chosen.length > 1 ? swatch(line.colour, this.panel.run ? [] : line.dash, 18) : null,
      line.label ? h("span", { class: "who", title: line.label }, line.label) : null, h("b", {}, line.text ?? show(line.value, this.panel)))),
      values.length > few.length ? h("span", {}, `+${values.length - few.length}`) : null].filter(Boolean));
  }

  enlarge() {
    const dialog = $("large");
    const card = new Card(this.panel, { height: Math.round(innerHeight * 0.58) });
    dialog.replaceChildren(card.element, h("p", { class: "about" }, this.panel.about, " ", h("span", { class: "mono" }, this.panel.metrics.join("  "))),
      h("form", { method: "dialog" }, h("button", {}, "Close")));
    dialog.addEventListener("close", () => { cards = cards.filter((each) => each !== card); card.destroy(); dialog.replaceChildren(); }, { once: true });
    dialog.showModal();
    cards.push(card);
    card.visible = true;
    card.refresh().then(() => card.plot.focus());
  }
}

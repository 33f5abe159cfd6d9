// The view of all panels: what came out at the top, then one card for each panel, in the reader's own arrangement.

import { $, h } from "./dom.js";
import { get } from "./api.js";
import { Card, loose } from "./card.js";
import { setRange } from "./chart.js";
import { menuButton } from "./menu.js";
import { AXES } from "./series.js";
import { remember, slug, state } from "./state.js";
import { ParityLine, results, totalsOf, trouble } from "./summary.js";

const STACKS = 4; // runs whose stacks are shown
let cards = [];
let sections = [], layout = "";
let head, parity;
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
  const [found, totals] = await Promise.all([get("panels", { run: state.chosen }), totalsOf(state.chosen)]);
  if (mine !== state.drawn) return;
  sections = found;
  layout = JSON.stringify(sections);
  head = h("div");
  place(main);
  showTotals(totals);
}

// Build the page from `sections`, as arranged.
function place(main) {
  leaveCharts();
  parity = null;
  const groups = arranged().map((section) => {
    const grid = h("div", { class: "grid" }, section.panels.flatMap(byRun).map((panel) => {
      const card = new Card(panel, { arrange });
      cards.push(card);
      return card.element;
    }));
    if (section.parity) parity = new ParityLine(grid);
    return h("section", { class: "group" }, section.parity ? parity.heading : h("h2", {}, section.title), grid);
  });
  main.replaceChildren(head, ...(groups.length ? [tools(), ...groups] : state.chosen.every((run) => state.runs.get(run).status === "failed") ? [] // the reason stands above
    : [h("div", { class: "empty" }, h("p", {}, "No step is recorded yet. The first one appears here by itself."))]));
  for (const card of cards) seen.observe(card.element);
  filter();
}

// Lines of several runs share a panel; each run's stack has its own.
const byRun = (panel) => (panel.kind === "stack" ? state.chosen.slice(0, STACKS).map((run) => ({ ...panel, run })) : [panel]);

// ---------------------------------------------------------------------------------------------- arrangement

function arranged() {
  const rank = (panel) => { const at = state.move.indexOf(slug(panel)); return at < 0 ? Infinity : at; };
  const all = sections.flatMap((section) => section.panels);
  const shown = (panel) => !state.hide.includes(slug(panel));
  const pinned = state.pin.map((name) => all.find((panel) => slug(panel) === name)).filter((panel) => panel && shown(panel));
  const rest = sections.map((section) => {
    const panels = section.panels.filter((panel) => shown(panel) && !pinned.includes(panel));
    return { ...section, panels: panels.map((panel, index) => [panel, rank(panel), index]).sort((a, b) => (a[1] === b[1] ? a[2] - b[2] : a[1] - b[1])).map(([panel]) => panel) };
  });
  return [{ title: "Pinned", panels: pinned }, ...rest].filter((section) => section.panels.length);
}

// `what`: "pin", "hide", a number of places to move by, or the slug of the panel to move before.
function arrange(name, what) {
  const home = arranged().find((section) => section.panels.some((panel) => slug(panel) === name));
  const order = home.panels.map(slug);
  const at = order.indexOf(name);
  if (what === "pin") state.pin = state.pin.includes(name) ? state.pin.filter((each) => each !== name) : [...state.pin, name];
  else if (what === "hide") state.hide = [...state.hide, name];
  else {
    const to = typeof what === "number" ? at + what : order.indexOf(what);
    if (to < 0 || to >= order.length) return;
    order.splice(at, 1);
    order.splice(to, 0, name);
    if (state.pin.includes(name)) state.pin = order;
    else state.move = [...state.move.filter((each) => !order.includes(each)), ...order];
  }
  again(name);
}

function again(name) {
  const main = $("main"), totals = head.totals;
  const scroller = [main, document.querySelector(".body")], tops = scroller.map((each) => each.scrollTop);
  remember();
  place(main);
  parity?.show(totals);
  scroller.forEach((each, index) => { each.scrollTop = tops[index]; });
  const element = document.querySelector(`.card[data-slug="${CSS.escape(name ?? "")}"] .plot`);
  element?.focus({ preventScroll: true });
  element?.closest(".card").scrollIntoView({ block: "nearest" });
}

function hidden() {
  const all = sections.flatMap((section) => section.panels);
  return [...state.hide.map((name) => ({ text: all.find((panel) => slug(panel) === name)?.title ?? name, act: () => { state.hide = state.hide.filter((each) => each !== name); again(name); } })),
    { text: "All of them", act: () => { state.hide = []; again(); } }];
}

// ---------------------------------------------------------------------------------------------- refreshing

export function leaveCharts() {
  for (const card of cards) { seen.unobserve(card.element); card.destroy(); }
  cards = [];
}

function refreshCards() {
  for (const card of cards) { card.stale = true; if (card.visible) card.refresh(); }
  for (const card of loose) card.refresh();
}

async function showTotals(found) {
  const all = found ?? await totalsOf(state.chosen);
  if (!head?.isConnected || JSON.stringify(all) === JSON.stringify(head.totals)) return; // a click is lost where its button is drawn anew
  const top = head.querySelector(".strip")?.scrollTop ?? 0;
  head.totals = all;
  head.replaceChildren(...trouble(all), results(all, () => showTotals()));
  head.querySelector(".strip").scrollTop = top;
  parity?.show(all);
}

export async function refreshCharts(runs) {
  if (!runs.some((run) => state.chosen.includes(run))) return;
  const mine = state.drawn;
  const now = await get("panels", { run: state.chosen });
  if (mine !== state.drawn) return;
  if (JSON.stringify(now) !== layout) { // a metric that was not there before
    const main = $("main"), top = main.scrollTop;
    await showCharts(main);
    main.scrollTop = top;
    return;
  }
  refreshCards();
  await showTotals();
}

export const cardOf = (element) => cards.find((card) => card.element.contains(element));
export function toggleTables() {
  state.tables = !state.tables;
  for (const card of cards) card.setTable(state.tables);
}

// ---------------------------------------------------------------------------------------------- tools

function nothing() {
  return state.runs.size
    ? h("div", { class: "empty" }, h("h2", {}, "No run is chosen"), h("p", {}, "Choose one or several at the left; they are drawn over one another."))
    : h("div", { class: "empty" }, h("h2", {}, "No runs yet"), h("p", {}, "A run appears here as soon as it starts: ",
        h("code", {}, "rlloop train --config-name countdown"), ". To look around without one: ", h("code", {}, "rlloop dashboard --demo"), "."));
}

function tools() {
  const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "Smoothing", oninput: (event) => {
    state.smooth = Number(event.target.value);
    remember();
    refreshCards();
  } });
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: (event) => {
    state.axis = event.target.value;
    setRange(null);
    refreshCards();
  } }, Object.entries(AXES).map(([name, { title }]) => h("option", { value: name, selected: name === state.axis }, title)));
  return h("div", { class: "tools" },
    h("input", { type: "search", id: "find", placeholder: "Find a metric  ( / )", "aria-label": "Find a metric", value: state.search, oninput: (event) => { state.search = event.target.value; filter(); } }),
    h("label", {}, "Over", axis), h("label", {}, "Smoothing", smooth),
    h("button", { type: "button", onclick: () => setRange(null), title: "Show the whole axis again (r)" }, "Zoom out"),
    h("button", { type: "button", onclick: toggleTables }, "Tables"),
    state.hide.length ? menuButton(`${state.hide.length} hidden`, "Hidden panels", hidden) : null,
    h("span", { class: "hint" }, "Click a chart to open the step, drag to zoom."));
}

function filter() {
  const wanted = state.search.toLowerCase();
  for (const card of cards) card.element.hidden = ![card.panel.title, ...card.panel.metrics].some((text) => text.toLowerCase().includes(wanted));
  for (const group of document.querySelectorAll("section.group")) group.hidden = !group.querySelector(".card:not([hidden])");
  if (parity) { if (wanted) parity.grid.hidden = false; else parity.fold(); }
}

// The list of a step's or a run's completions: ordered, filtered, searched. One of them is shown beside it.

import { $, count, h, number } from "./dom.js";
import { get, link } from "./api.js";
import { swatch } from "./chart.js";
import { go, lookOf, route, shortName, state } from "./state.js";
import { completion, strength } from "./trace.js";

const PAGE = 100, CSV = 10000; // rows at once
const NARROW = 1180; // pixels: up to here a completion stands under the list
const ORDERS = [["newest", "newest step first"], ["reward_high", "highest reward first"], ["reward_low", "lowest reward first"], ["longest", "longest first"], ["shortest", "shortest first"],
  ["surprising", "most surprising first"], ["expected", "least surprising first"], ["advantage", "largest advantage first"], ["worst", "worst disagreement first"], ["k3", "largest KL first"], ["order", "in order"]];
let list = null; // what is on the page: {run, step, ask, rows, total, at}

export const runOf = (query) => (state.runs.has(query.get("of")) ? query.get("of") : state.chosen[0]);

export async function showRollouts(main, query) {
  const run = runOf(query);
  if (!run) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run is chosen"))); return; }
  await begin(main, query, { run, step: null }, [h("div", { class: "crumbs" }, h("h1", {}, "Rollouts"), runPicker("rollouts", run), h("span", { class: "muted", id: "index" }))]);
}

// Put a list under the `above` of a view.
export async function begin(main, query, what, above) {
  list = { ...what, ask: Object.fromEntries(["order", "kind", "solved", "group", "search"].map((name) => [name, query.get(name) ?? ""])) };
  main.replaceChildren(...above, body());
  await fetchPage(0);
}

export function runPicker(view, run, step) {
  const { colour, dash } = lookOf(run);
  const all = state.chosen.includes(run) ? state.chosen : [run, ...state.chosen];
  if (all.length < 2) return h("span", { class: "muted" }, shortName(run));
  return h("span", {}, state.chosen.includes(run) ? swatch(colour, dash) : "", " ", h("select", { "aria-label": "Run", onchange: (event) => go(view, { of: event.target.value, step }) },
    all.map((id) => h("option", { value: id, selected: id === run }, shortName(id)))));
}

function body() {
  const pick = (name, options, label) => h("select", { id: `by-${name}`, "aria-label": label, onchange: (event) => { list.ask[name] = event.target.value; fetchPage(0); } },
    options.map(([value, text]) => h("option", { value, selected: list.ask[name] === value }, text)));
  let typing;
  const search = h("input", { type: "search", id: "find", placeholder: "Search completions  ( / )", "aria-label": "Search completions", value: list.ask.search, oninput: (event) => {
    clearTimeout(typing);
    typing = setTimeout(() => { list.ask.search = event.target.value.trim(); fetchPage(0); }, 250);
  } });
  return h("div", { class: "split" },
    h("article", { class: "card" },
      h("header", { style: { flexWrap: "wrap" } }, h("h3", {}, list.step === null ? "Completions of the run" : "Completions"), h("span", { class: "unit", id: "count" }),
        h("div", { class: "actions", style: { opacity: 1, position: "static", marginLeft: "auto" } }, h("a", { id: "rollouts-csv", href: "#", download: "" }, "CSV"))),
      h("div", { class: "tools" }, search, pick("order", ORDERS, "Order"),
        pick("kind", [["", "every outcome"], ["trained", "trained"], ["rejected", "rejected"], ["dropped", "dropped"]], "Outcome"),
        pick("solved", [["", "solved or not"], ["yes", "solved"], ["no", "not solved"]], "Solved"),
        list.ask.group === "" ? null : h("button", { type: "button", onclick: (event) => { list.ask.group = ""; event.target.remove(); fetchPage(0); } }, `group ${list.ask.group} only ✕`)),
      h("div", { class: "rollouts", id: "rollouts" })),
    h("article", { class: "card detail", id: "detail" }, h("p", { class: "muted" }, "Choose a completion.")));
}

// New data does not move a reader who has chosen a completion, or scrolled.
const untouched = () => (list.at ?? 0) === 0 && $("rollouts").scrollTop === 0;

async function fetchPage(offset, unasked = false) {
  const mine = list;
  const parameters = { run: mine.run, step: mine.step ?? undefined, ...mine.ask };
  const asked = JSON.stringify(mine.ask);
  const found = await get("rollouts", { ...parameters, offset, limit: PAGE });
  if (mine !== list || asked !== JSON.stringify(mine.ask) || !$("rollouts")) return;
  if (unasked && !untouched()) { progress(found.index); return; }
  mine.rows = offset ? [...mine.rows, ...found.rows] : found.rows;
  mine.total = found.total;
  $("by-order").value = found.order;
  $("count").textContent = `${number(found.total)}`;
  $("rollouts-csv").textContent = found.total > CSV ? `CSV of the first ${number(CSV)}` : "CSV";
  $("rollouts-csv").href = link("rollouts", { ...parameters, limit: CSV, format: "csv" });
  progress(found.index);
  const more = mine.rows.length < mine.total ? h("button", { type: "button", onclick: () => fetchPage(mine.rows.length) }, `Show more (${number(mine.total - mine.rows.length)} left)`) : null;
  const headings = ["Completion", "Reward", "Surprise", "Parity"];
  const table = h("table", {}, h("thead", {}, h("tr", {}, headings.map((text, column) => h("th", { scope: "col", class: column ? "num" : "", title: { Surprise: "Mean negative logprob of a token, in nats", Parity: "Largest |d|: trainer's logprob minus engine's" }[text] }, text)))),
    h("tbody", {}, mine.rows.map((row, index) => line(row, index))));
  const box = $("rollouts");
  const top = offset ? box.scrollTop : 0;
  box.replaceChildren(...(found.index.problems.length ? found.index.problems.slice(0, 4).map((text) => h("p", { class: "warn" }, text)) : []),
    mine.rows.length ? table : h("p", { class: "muted" }, none(mine, found.index)), more ?? "");
  box.scrollTop = top;
  if (mine.rows.length && !offset) select(0, false);
  if (!mine.rows.length) {
    mine.shown = null;
    $("detail").replaceChildren(h("p", { class: "muted" }, "Nothing is chosen."));
  }
}

function line(row, index) {
  const about = [row.turns > 1 ? `${number(row.turns)} turns` : "", count(row.tokens, "token"), row.outcome === "trained" ? "" : row.outcome, row.finish === "length" ? "truncated" : ""];
  return h("tr", { "data-index": index, onclick: () => { select(index); if (innerWidth <= NARROW) $("detail").scrollIntoView({ block: "start" }); }, "aria-selected": "false" },
    h("td", {}, h("span", { class: "text" }, row.text || h("span", { class: "muted" }, "empty")), row.prompt ? h("span", { class: "asked" }, row.prompt) : null,
      h("span", { class: "meta" }, h("span", { class: "mono" }, row.uid), ` ${about.filter(Boolean).join(", ")}`)),
    h("td", { class: "num" }, row.reward === null ? "not finite" : number(row.reward, 3), h("div", { class: row.solved ? "good" : "muted" }, row.solved ? "solved" : "")),
    h("td", { class: "num" }, number(row.surprise, 3)),
    h("td", { class: "num" }, ...difference(row)));
}

function none({ step, ask }, index) {
  if (ask.search) return "No completion contains this text.";
  if (ask.kind || ask.solved || ask.group) return "No completion is of this kind.";
  if (step !== null) return index.problems.length ? "" : "No completions of this step are recorded.";
  return index.of ? "" : "No completions are recorded yet.";
}

function difference(row) {
  if (row.different === null) return [h("span", { class: "muted" }, "not compared")];
  if (row.different === 0) return [h("span", { class: "good" }, "equal bits")];
  const meter = h("span", { class: "meter" }, h("i", { style: { width: `${100 * strength(row.diff ?? Infinity)}%` } }));
  return [meter, row.diff === null ? "not finite" : number(row.diff, 3), h("div", { class: "muted" }, `${row.different} of ${row.tokens} differ`)];
}

function progress(index) {
  const place = $("index");
  if (place) place.textContent = index.files < index.of ? `reading rollouts: ${number(index.files)} of ${number(index.of)} steps…` : `${count(index.rollouts, "completion")} of ${count(index.of, "step")}`;
  if (index.files < index.of) {
    const mine = list;
    setTimeout(() => { if (mine === list && mine.step === null && $("rollouts")) fetchPage(0, true); }, 1500);
  }
}

export function refreshRollouts(runs) {
  if (!list || !runs.includes(list.run) || route().view === "step") return;
  if ($("rollouts") && untouched()) fetchPage(0, true);
}

async function select(index, scroll = true) {
  const row = list?.rows[index];
  if (!row) return;
  list.at = index;
  for (const each of document.querySelectorAll("#rollouts tbody tr")) {
    const chosen = Number(each.dataset.index) === index;
    each.setAttribute("aria-selected", String(chosen));
    if (chosen && scroll) each.scrollIntoView({ block: "nearest" });
  }
  const mine = list, key = `${row.step}/${row.line}`;
  if (mine.shown === key) return; // who reads it, or waits for it, is left at it
  mine.shown = key;
  const left = () => mine !== list || mine.shown !== key || !$("detail");
  try {
    const full = await get("rollout", { run: mine.run, step: row.step, line: row.line });
    if (left()) return;
    $("detail").replaceChildren(...completion(mine.run, row, full, mine.step === null));
  } catch (error) {
    if (left()) return;
    mine.shown = null;
    $("detail").replaceChildren(h("p", { class: "bad" }, error.message));
  }
}

export function keyOfRollouts(event) {
  const view = route().view;
  if (!list || (view !== "step" && view !== "rollouts")) return false;
  if (event.key === "j") select(Math.min((list.at ?? -1) + 1, list.rows.length - 1));
  else if (event.key === "k") select(Math.max((list.at ?? 1) - 1, 0));
  else if ((event.key === "[" || event.key === "]") && view === "step") {
    const next = list.step + (event.key === "[" ? -1 : 1);
    if (list.bounds && next >= list.bounds.first && next <= list.bounds.last) go("step", { of: list.run, step: next });
  } else return false;
  return true;
}

// Completions of a step or of the whole run: largest differences first, tokens coloured by difference.

import { $, h, number, percent, duration } from "./dom.js";
import { get, link } from "./api.js";
import { swatch } from "./chart.js";
import { histogram } from "./histogram.js";
import { address, go, look, lookOf, route, shortName, state } from "./state.js";
import { certificateFacts } from "./records.js";

const PAGE = 100, CSV = 10000; // rows at once
const ORDERS = [["worst", "worst disagreement first"], ["k3", "largest KL first"], ["reward_low", "lowest reward first"], ["reward_high", "highest reward first"],
  ["advantage", "largest advantage first"], ["longest", "longest first"], ["newest", "newest step first"], ["order", "in order"]];
let list = null; // what is on the page: {run, step, ask, rows, total, at}

const runOf = (query) => (state.runs.has(query.get("of")) ? query.get("of") : state.chosen[0]);

export async function showRollouts(main, query) {
  const run = runOf(query);
  if (!run) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run is chosen"))); return; }
  list = { run, step: null, ask: asked(query) };
  main.replaceChildren(h("div", { class: "crumbs" }, h("h1", {}, "Rollouts"), runPicker("rollouts", run), h("span", { class: "muted", id: "index" })), body());
  await fetchPage(0);
}

export async function showStep(main, query) {
  const run = runOf(query);
  if (!run) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run is chosen"))); return; }
  const step = Number(query.get("step"));
  const mine = state.drawn;
  const { record, certificate, bounds } = await get("record", { run, step });
  if (mine !== state.drawn) return;
  list = { run, step, ask: asked(query), bounds };
  const to = (next) => h("button", { type: "button", disabled: !bounds || next < bounds.first || next > bounds.last, onclick: () => go("step", { of: run, step: next }), "aria-label": `Step ${next}` }, next < step ? "←" : "→");
  main.replaceChildren(
    h("div", { class: "crumbs" }, h("a", { href: address("charts") }, "Charts"), h("h1", {}, `Step ${number(step)}`), to(step - 1), to(step + 1), runPicker("step", run, step)),
    h("div", { class: "three" }, facts(run, record), timeline(record), ratio(run, record), certificateOf(run, certificate)),
    body());
  await fetchPage(0);
}

const asked = (query) => ({ order: query.get("order") ?? "worst", kind: query.get("kind") ?? "", solved: query.get("solved") ?? "", group: query.get("group") ?? "" });

function runPicker(view, run, step) {
  const { colour, dash } = lookOf(run);
  const all = state.chosen.includes(run) ? state.chosen : [run, ...state.chosen];
  if (all.length < 2) return h("span", { class: "muted" }, shortName(run));
  return h("span", {}, state.chosen.includes(run) ? swatch(colour, dash) : "", " ", h("select", { "aria-label": "Run", onchange: (event) => go(view, { of: event.target.value, step }) },
    all.map((id) => h("option", { value: id, selected: id === run }, shortName(id)))));
}

// ---------------------------------------------------------------------------------------------- one step

const card = (title, ...children) => h("article", { class: "card" }, h("header", {}, h("h3", {}, title)), ...children);

function facts(run, record) {
  if (!record) return card("Record", h("p", { class: "muted" }, "This step has no record: it is not finished, or the run stopped in it."));
  const name = h("input", { type: "search", id: "find", placeholder: "Find a metric  ( / )", "aria-label": "Find a metric" });
  const items = h("dl", { class: "facts" });
  const first = ["reward/mean", "reward/solved", "eval/solved", "parity/k3", "parity/tokens_different", "loss/tokens_discarded", "loss/entropy", "loss/grad_norm"];
  const fill = () => {
    const wanted = name.value.toLowerCase();
    const names = wanted ? Object.keys(record).filter((key) => key.includes(wanted)) : first.filter((key) => key in record);
    items.replaceChildren(...names.filter((key) => typeof record[key] !== "object" || record[key] === null).flatMap((key) => [h("dt", { class: "mono" }, key), h("dd", {}, record[key] === null ? "not finite" : number(record[key]))]));
  };
  name.addEventListener("input", fill);
  fill();
  return card("Record", items, h("div", { style: { marginTop: "8px" } }, name));
}

function timeline(record) {
  const phases = Object.entries(record ?? {}).filter(([name, value]) => name.startsWith("time/") && name !== "time/step" && value > 0).map(([name, value]) => [name.slice(5), value]);
  if (!phases.length) return "";
  const spent = phases.reduce((sum, [, value]) => sum + value, 0);
  const whole = Math.max(spent, record["time/step"] ?? 0);
  const order = ["sync", "rollout", "reward", "advantage", "parity", "update", "record", "eval"];
  phases.sort(([a], [b]) => (order.indexOf(a) + 99) % 99 - (order.indexOf(b) + 99) % 99);
  const all = [...phases, ["waiting", whole - spent]].filter(([, value]) => value > whole * 1e-4);
  const paint = (name, index) => (/wait|idle/.test(name) ? { class: "wait" } : { style: { background: look(index).colour } });
  return card("Where the time went",
    h("div", { class: "phases", role: "img", "aria-label": all.map(([name, value]) => `${name} ${duration(value)}`).join(", ") },
      all.map(([name, value], index) => { const part = h("i", paint(name, index)); part.style.flex = `${(value / whole) * 1000} 0 0`; part.title = `${name}: ${duration(value)}`; return part; })),
    h("div", { class: "keys" }, all.map(([name, value], index) => h("span", {}, h("i", paint(name, index)), name, h("b", {}, duration(value))))),
    h("p", { class: "muted" }, `${duration(whole)} in all. What no phase claims is waiting.`));
}

function ratio(run, record) {
  const counts = record?.["is/log_ratio_histogram"];
  if (!counts) return "";
  return card("Log ratio, trainer − engine", histogram([{ run, ...counts, ...lookOf(run), dash: [] }], 240, 150),
    h("p", { class: "muted" }, `ESS ${percent(record["is/ess"])}, ratio ${number(record["is/ratio_min"])} to ${number(record["is/ratio_max"])}`));
}

function certificateOf(run, line) {
  if (!line) return card("Certificate", h("p", { class: "muted" }, "No tokens were compared in this step."));
  return card("Certificate", certificateFacts(line, state.runs.get(run).mode));
}

// ---------------------------------------------------------------------------------------------- the list

function body() {
  const pick = (name, options, label) => h("select", { "aria-label": label, onchange: (event) => { list.ask[name] = event.target.value; fetchPage(0); } },
    options.map(([value, text]) => h("option", { value, selected: list.ask[name] === value }, text)));
  return h("div", { class: "split" },
    h("article", { class: "card" },
      h("header", {}, h("h3", {}, list.step === null ? "Completions of the run" : "Completions"), h("span", { class: "unit", id: "count" }),
        h("div", { class: "actions", style: { opacity: 1 } }, h("a", { id: "rollouts-csv", href: "#", download: "" }, "CSV"))),
      h("div", { class: "tools" }, pick("order", ORDERS, "Order"),
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
  const found = await get("rollouts", { ...parameters, offset, limit: PAGE });
  if (mine !== list || !$("rollouts")) return;
  if (unasked && !untouched()) { progress(found.index); return; }
  mine.rows = offset ? [...mine.rows, ...found.rows] : found.rows;
  mine.total = found.total;
  $("count").textContent = `${number(found.total)}`;
  $("rollouts-csv").textContent = found.total > CSV ? `CSV of the first ${number(CSV)}` : "CSV";
  $("rollouts-csv").href = link("rollouts", { ...parameters, limit: CSV, format: "csv" });
  progress(found.index);
  const more = mine.rows.length < mine.total ? h("button", { type: "button", onclick: () => fetchPage(mine.rows.length) }, `Show more (${number(mine.total - mine.rows.length)} left)`) : null;
  const table = h("table", {}, h("thead", {}, h("tr", {}, ["Completion", "Reward", "Largest |d|"].map((text, column) => h("th", { scope: "col", class: column ? "num" : "" }, text)))),
    h("tbody", {}, mine.rows.map((row, index) => h("tr", { "data-index": index, onclick: () => select(index), "aria-selected": "false" },
      h("td", {}, h("span", { class: "mono" }, row.uid), " ", h("span", { class: "muted" }, [row.outcome === "trained" ? "" : row.outcome, row.finish === "length" ? "truncated" : "", `${row.tokens} tokens`].filter(Boolean).join(", ")),
        h("span", { class: "text" }, row.prompt, " ⟶ ", row.text)),
      h("td", { class: "num" }, row.reward === null ? "not finite" : number(row.reward, 3), h("div", { class: row.solved ? "good" : "muted" }, row.solved ? "solved" : "")),
      h("td", { class: "num" }, ...difference(row))))));
  const box = $("rollouts");
  const top = offset ? box.scrollTop : 0;
  box.replaceChildren(...(found.index.problems.length ? found.index.problems.slice(0, 4).map((text) => h("p", { class: "warn" }, text)) : []),
    mine.rows.length ? table : h("p", { class: "muted" }, none(mine, found.index)), more ?? "");
  box.scrollTop = top;
  if (mine.rows.length && !offset) select(0, false);
  if (!mine.rows.length) $("detail").replaceChildren(h("p", { class: "muted" }, "Nothing is chosen."));
}

function none({ step, ask }, index) {
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
  if (place) place.textContent = index.files < index.of ? `reading rollouts: ${number(index.files)} of ${number(index.of)} steps…` : `${number(index.rollouts)} completions of ${number(index.of)} steps`;
  if (index.files < index.of) {
    const mine = list;
    setTimeout(() => { if (mine === list && mine.step === null && $("rollouts")) fetchPage(0, true); }, 1500);
  }
}

export function refreshRollouts(runs) {
  if (!list || !runs.includes(list.run) || route().view === "step") return;
  if ($("rollouts") && untouched()) fetchPage(0, true);
}

// ---------------------------------------------------------------------------------------------- one completion

// 0 to 1, on a logarithmic scale from a difference of 1e-7 (a last bit) to 1 nat.
const strength = (d) => (d === 0 ? 0 : Math.min(1, Math.max(0.06, (Math.log10(Math.abs(d)) + 7) / 7)));

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
  if (mine.shown === key) return; // who reads it is left at it
  try {
    const full = await get("rollout", { run: mine.run, step: row.step, line: row.line });
    if (mine !== list || mine.at !== index || !$("detail")) return;
    mine.shown = key;
    $("detail").replaceChildren(...detail(mine.run, row, full));
  } catch (error) {
    mine.shown = null;
    $("detail")?.replaceChildren(h("p", { class: "bad" }, error.message));
  }
}

function detail(run, row, full) {
  const inspector = h("div", { class: "inspector", role: "status" }, full.compared
    ? "Point at a token, or move to it by Tab, for its numbers." : "Not trained, so the trainer did not score it: there is nothing to compare.");
  const tokens = h("div", { class: "tokens", "aria-label": "Completion, token by token" }, full.tokens.map((token) => tokenOf(token, full, inspector)));
  const known = full.prompt_tokens !== null;
  const where = list.step === null ? h("a", { href: address("step", { of: run, step: row.step }) }, `step ${row.step}`) : null;
  return [
    h("header", {}, h("h3", {}, `Completion ${full.uid}`), where, h("span", { class: "grow" }),
      h("a", { href: address("step", { of: run, step: row.step, group: row.grp, order: "order" }) }, "its group")),
    h("div", { class: "muted", style: { marginTop: "6px" } }, "Prompt"), h("div", { class: "mono", style: { whiteSpace: "pre-wrap", maxHeight: "120px", overflow: "auto" } }, full.prompt),
    h("div", { class: "muted", style: { marginTop: "8px" } }, "Completion"), tokens,
    known ? null : h("p", { class: "muted" }, "The run's folder holds no tokenizer, so tokens are shown by their ids. The text: ", h("span", { class: "mono" }, full.text)),
    legend(full), inspector,
    h("div", { class: "beside" }, rewards(full), h("dl", { class: "facts" },
      ...[["Outcome", full.outcome], ["Advantage", number(full.advantage)], ["Finish", full.finish_reason], ["Policy version", number(full.policy_version)],
        ["Example", full.example], ["Engine", h("span", { class: "mono", title: full.engine }, String(full.engine).slice(0, 12))],
        ["Sampling", h("span", { class: "mono", style: { whiteSpace: "normal" } }, Object.entries(full.sampling ?? {}).map(([key, value]) => `${key}=${value}`).join(" "))]].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))),
  ].filter(Boolean);
}

function tokenOf(token, full, inspector) {
  const written = "engine" in token;
  const differs = full.compared && written && !token.same;
  const text = token.text === null ? h("span", { class: "id" }, `${token.id} `) : token.text.replaceAll("\n", "↵\n");
  const element = h("button", { type: "button", class: `tok ${written ? "" : "other"} ${differs ? (token.d > 0 ? "more" : "less") : ""}` }, text);
  if (differs) element.style.background = `rgb(var(${token.d > 0 ? "--low" : "--high"}) / ${(0.08 + 0.62 * strength(token.d ?? Infinity)).toFixed(3)})`;
  const tell = () => inspector.replaceChildren(...(written ? [
    h("b", {}, token.text === null ? `id ${token.id}` : JSON.stringify(token.text)), ` id ${token.id}  ·  engine ${number(token.engine, 9)}`,
    ...(full.compared ? [`  ·  trainer ${number(token.trainer, 9)}`, h("div", {}, token.same ? h("span", { class: "good" }, "equal bits: d is 0")
      : h("span", {}, "d = ", h("b", {}, token.d === null ? "not finite" : number(token.d, 4)), `, ratio ${token.d === null ? "not finite" : number(Math.exp(token.d), 5)}: the trainer finds it ${token.d > 0 ? "more" : "less"} likely than the engine that sampled it`))] : []),
  ] : [h("b", {}, JSON.stringify(token.text)), ` id ${token.id}: not written by the policy`]));
  element.addEventListener("mouseenter", tell);
  element.addEventListener("focus", tell);
  return element;
}

function legend(full) {
  if (!full.compared) return null;
  if (full.tokens.every((token) => token.same !== false)) return h("p", { class: "good", style: { margin: "2px 0 6px" } }, "Every token has the same bits in engine and trainer.");
  const box = (side, d) => { const part = h("i"); part.style.background = `rgb(var(${side}) / ${0.08 + 0.62 * strength(d)})`; part.title = `|d| = ${d}`; return part; };
  return h("div", { class: "scale", style: { margin: "2px 0 6px" } }, "less likely to the trainer", ...[1, 1e-2, 1e-4, 1e-6].map((d) => box("--high", d)), "equal", ...[1e-6, 1e-4, 1e-2, 1].map((d) => box("--low", d)), "more likely", h("span", {}, "(1 … 1e−6 nats)"));
}

function rewards(full) {
  const parts = Object.entries(full.components ?? {});
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value)));
  return h("table", { class: "components" }, h("tbody", {},
    h("tr", {}, h("td", {}, h("b", {}, "Reward")), h("td", {}), h("td", {}, h("b", {}, number(full.reward)), full.solved ? h("span", { class: "good" }, "  solved") : "")),
    parts.map(([name, value]) => h("tr", {}, h("td", {}, name.replaceAll("_", " ")), h("td", {}, h("span", { class: "meter" }, h("i", { style: { width: `${(100 * Math.abs(value)) / most}%` } }))), h("td", {}, number(value))))));
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

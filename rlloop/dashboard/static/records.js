// A run's records: certificate, fingerprints, log, and configuration, alone or beside another run's.

import { $, h, number, virtualTable } from "./dom.js";
import { get } from "./api.js";
import { go, shortName, state } from "./state.js";

const digest = (text) => h("span", { class: "mono", title: text }, String(text).slice(0, 10), "…");

// One line of the certificate as text.
export function certificateFacts(line, mode) {
  const equal = line.engine === line.trainer;
  const besides = [["raw_different", "raw logprobs differ"], ["redrawn_different", "tokens are other draws"], ["faults", "completions are not as asked for"]]
    .filter(([key]) => line[key]).map(([key, what]) => `${number(line[key])} ${what}`);
  const rows = [
    ["Verdict", h("b", { class: equal && !besides.length ? "good" : "warn" }, [equal ? "equal bits, every token" : `${number(line.tokens_different)} of ${number(line.tokens)} tokens differ`, ...besides].join("; "))],
    ["Tokens compared", number(line.tokens)],
    ...(line.redrawn === undefined ? [] : [["Tokens drawn again", number(line.redrawn)]]),
    ["Weights", `version ${number(line.version)}`],
    ["Engine's bits", digest(line.engine)],
    ["Trainer's bits", digest(line.trainer)],
    ...(mode === "fallback" ? [["Rung", line.rung ?? "bitwise"]] : []),
    ["Fingerprints", line.fingerprints ? h("span", {}, digest(line.fingerprints.engine), line.fingerprints.engine === line.fingerprints.trainer ? " both" : [" and ", digest(line.fingerprints.trainer)]) : "–"],
    ["This line", digest(line.hash)],
    ["The line before", digest(line.previous)],
  ];
  return h("dl", { class: "facts" }, rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

let shown = null;

export async function showCertificate(main, query) {
  const run = state.runs.has(query.get("of")) ? query.get("of") : state.chosen[0];
  if (!run) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run is chosen"))); return; }
  const mine = state.drawn;
  const [found, { lines: log }] = await Promise.all([get("certificate", { run, last: 100000 }), get("log", { run })]);
  if (mine !== state.drawn) return;
  const whole = !found.breaks.length;
  const lines = found.lines;
  shown = { main, query, run, next: Date.now() + 2 * lines.length }; // a long one is not read again at each step
  const ladder = state.runs.get(run).mode === "fallback";
  const picker = state.chosen.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => go("certificate", { of: event.target.value }) }, state.chosen.map((id) => h("option", { value: id, selected: id === run }, shortName(id)))) : h("span", { class: "muted" }, shortName(run));
  main.replaceChildren(
    h("div", { class: "crumbs" }, h("h1", {}, "Certificate"), picker),
    h("div", { class: "strip" }, h("div", { class: "row", style: { gridTemplateColumns: "repeat(auto-fit, minmax(160px, 1fr))" } },
      fact("Chain", found.steps ? h("span", { class: whole ? "good" : "bad" }, whole ? "unbroken" : `broken at ${found.breaks.length === 1 ? "1 place" : `${found.breaks.length} places`}`) : "–"),
      fact("Steps certified", number(found.steps)),
      fact("Tokens compared", number(found.tokens)),
      fact("Tokens that differ", h("span", { class: found.tokens && !found.different ? "good" : "" }, number(found.different))),
      fact("Parity mode", state.runs.get(run).mode ?? "–"),
      ladder && found.rungs.length ? fact("Rung", found.rungs[found.rungs.length - 1].rung) : null)),
    found.breaks.length || found.problems.length ? h("div", { class: "problems" }, [...found.problems, ...found.breaks].slice(0, 8).map((text) => h("p", {}, text))) : "",
    found.rungs.length > 1 ? h("div", { class: "problems" }, found.rungs.map(({ step, rung }) => h("p", {}, `from step ${step}: ${rung}`))) : "",
    found.report ? h("article", { class: "card", style: { marginBottom: "12px" } }, h("header", {}, h("h3", { class: "bad" }, `The contract broke at step ${found.report.step}`)),
      h("p", {}, found.report.objection), found.report.doctor ? h("p", {}, h("b", {}, "Doctor: "), found.report.doctor.text) : "") : "",
    h("article", { class: "card", style: { marginBottom: "12px" } }, h("header", {}, h("h3", {}, "Lines")),
      lines.length ? clickable(virtualTable(["step", "version", "tokens", "different", "engine's bits", "trainer's bits", ...(ladder ? ["rung"] : []), "hash"], lines.length,
        (index) => { const line = lines[index]; return [number(line.step), number(line.version), number(line.tokens), number(line.tokens_different), bits(line.engine), bits(line.trainer), ...(ladder ? [line.rung ?? "bitwise"] : []), bits(line.hash)]; },
        { height: Math.min(330, 32 + lines.length * 24), label: "Certificate" }), run) : h("p", { class: "muted" }, "No step is certified yet.")),
    fingerprints(found.fingerprints),
    h("article", { class: "card" }, h("header", {}, h("h3", {}, "Log")), log.length ? h("pre", { class: "log mono" }, log.join("\n")) : h("p", { class: "muted" }, "Empty.")));
}

const bits = (text) => h("span", { class: "mono" }, text.slice(0, 12));
const fact = (label, value) => h("div", { class: "cell" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value));

function clickable(table, run) {
  table.addEventListener("click", (event) => {
    const heading = event.target.closest("tbody tr")?.querySelector("th");
    if (heading) go("step", { of: run, step: heading.textContent.replaceAll(",", "") });
  });
  return table;
}

export function refreshCertificate(runs) {
  const box = $("main").querySelector(".scroll");
  const reading = box && box.scrollTop + box.clientHeight < box.scrollHeight - 30; // who scrolled back is left there
  if (shown && runs.includes(shown.run) && !reading && Date.now() > shown.next) showCertificate(shown.main, shown.query);
}

function flat(value, prefix = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return { [prefix]: value };
  return Object.assign({}, ...Object.entries(value).map(([key, inner]) => flat(inner, prefix ? `${prefix}.${key}` : key)));
}

function fingerprints(all) {
  const names = Object.keys(all);
  if (!names.length) return "";
  const columns = names.map((name) => flat(all[name]));
  const keys = [...new Set(columns.flatMap((column) => Object.keys(column)))];
  return h("article", { class: "card", style: { marginBottom: "12px" } }, h("header", {}, h("h3", {}, "Fingerprints: what decides the bits")),
    h("div", { class: "scroll", style: { maxHeight: "340px", marginTop: "6px" } }, h("table", { class: "list" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Key"), names.map((name) => h("th", { scope: "col" }, digest(name))))),
      h("tbody", {}, keys.map((key) => {
        const values = columns.map((column) => (key in column ? JSON.stringify(column[key]) : "absent"));
        return h("tr", { class: values.some((value) => value !== values[0]) ? "differ" : "" }, h("td", { class: "mono" }, key), values.map((value) => h("td", { class: "value" }, value)));
      })))));
}

// ---------------------------------------------------------------------------------------------- configuration

export async function showConfig(main, query) {
  const all = [...state.runs.keys()];
  const first = all.includes(query.get("a")) ? query.get("a") : state.chosen[0] ?? all[0];
  if (!first) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No runs yet"))); return; }
  const second = query.has("b") ? query.get("b") : state.chosen.find((run) => run !== first) ?? "";
  const mine = state.drawn;
  const { runs, rows, problems } = await get("config", { run: first, other: second || undefined });
  if (mine !== state.drawn) return;
  const two = runs.length === 2;
  let onlyDiffering = two && query.get("all") !== "yes";
  const pick = (name, value, options) => h("select", { "aria-label": name === "a" ? "Run" : "Compared with", onchange: (event) => go("config", { a: first, b: second || "", [name]: event.target.value || "" }) },
    options.map((id) => h("option", { value: id, selected: id === value }, id ? shortName(id) : "nothing: this run alone")));
  const find = h("input", { type: "search", id: "find", placeholder: "Find a key  ( / )", "aria-label": "Find a key", oninput: () => fill() });
  const body = h("tbody");
  const count = h("span", { class: "muted" });
  const fill = () => {
    const chosen = rows.filter((row) => (!onlyDiffering || row.differ) && row.key.toLowerCase().includes(find.value.toLowerCase()));
    body.replaceChildren(...chosen.map((row) => h("tr", { class: row.differ && !onlyDiffering ? "differ" : "" }, h("td", { class: "mono" }, row.key), row.values.map((value) => h("td", { class: "value" }, value ?? h("span", { class: "muted" }, "absent"))))));
    count.textContent = two ? `${rows.filter((row) => row.differ).length} of ${rows.length} keys differ` : `${rows.length} keys`;
    if (!chosen.length) body.append(h("tr", {}, h("td", { colspan: 1 + runs.length, class: "muted" }, onlyDiffering ? "No key differs." : "No key fits.")));
  };
  fill();
  main.replaceChildren(
    h("div", { class: "crumbs" }, h("h1", {}, "Configuration"), pick("a", first, all), h("span", { class: "muted" }, "beside"), pick("b", second, ["", ...all.filter((id) => id !== first)])),
    h("div", { class: "tools" }, find, two ? h("label", {}, h("input", { type: "checkbox", checked: !onlyDiffering, onchange: (event) => { onlyDiffering = !event.target.checked; fill(); } }), "equal keys too") : null, count),
    problems.length ? h("div", { class: "problems" }, problems.map((text) => h("p", {}, text))) : "",
    h("article", { class: "card" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Key"), runs.map((run) => h("th", { scope: "col" }, shortName(run))))), body)));
}

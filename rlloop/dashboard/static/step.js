// One step: its record, where its time went, its log ratios and its line of the certificate, above its completions.

import { duration, h, number, percent } from "./dom.js";
import { get } from "./api.js";
import { histogram } from "./histogram.js";
import { certificateFacts } from "./records.js";
import { begin, runOf, runPicker } from "./rollouts.js";
import { address, go, look, lookOf, state } from "./state.js";

export async function showStep(main, query) {
  const run = runOf(query);
  if (!run) { main.replaceChildren(h("div", { class: "empty" }, h("h2", {}, "No run is chosen"))); return; }
  const step = Number(query.get("step"));
  const mine = state.drawn;
  const { record, certificate, bounds } = await get("record", { run, step });
  if (mine !== state.drawn) return;
  const to = (next) => h("button", { type: "button", disabled: !bounds || next < bounds.first || next > bounds.last, onclick: () => go("step", { of: run, step: next }), "aria-label": `Step ${next}` }, next < step ? "←" : "→");
  await begin(main, query, { run, step, bounds }, [
    h("div", { class: "crumbs" }, h("a", { href: address("charts") }, "Charts"), h("h1", {}, `Step ${number(step)}`), to(step - 1), to(step + 1), runPicker("step", run, step)),
    h("div", { class: "three" }, facts(record), timeline(record), ratio(run, record), certificateOf(run, certificate)),
  ]);
}

const card = (title, ...children) => h("article", { class: "card" }, h("header", {}, h("h3", {}, title)), ...children);

function facts(record) {
  if (!record) return card("Record", h("p", { class: "muted" }, "This step has no record: it is not finished, or the run stopped in it."));
  const name = h("input", { type: "search", id: "find", placeholder: "Find a metric  ( / )", "aria-label": "Find a metric" });
  const items = h("dl", { class: "facts" });
  const first = ["reward/mean", "reward/solved", "eval/solved", "eval/reward", "rollout/length_mean", "loss/entropy", "loss/grad_norm", "parity/k3", "parity/tokens_different"];
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

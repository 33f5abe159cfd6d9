// A training API: its sessions, and of each model what waits, what is done, and whether its tokens had equal bits.

import { $, bytes, duration, h, number } from "./dom.js";
import { get } from "./api.js";
import { route, state } from "./state.js";

const EVERY = 2000; // milliseconds
let timer;

export async function showTraining(main) {
  clearTimeout(timer);
  const mine = state.drawn;
  const found = await get("training");
  if (mine !== state.drawn || route().view !== "training") return;
  const scroll = main.scrollTop;
  main.replaceChildren(h("div", { class: "crumbs" }, h("h1", {}, "Training API"), h("span", { class: "muted" }, found.url)),
    ...(found.problem ? [h("div", { class: "failed", role: "alert" }, h("p", {}, found.problem))] : page(found)));
  main.scrollTop = scroll;
  timer = setTimeout(() => { if (mine === state.drawn && route().view === "training" && $("main")) showTraining(main).catch(() => {}); }, EVERY);
}

function page(found) {
  const models = found.sessions.flatMap((session) => session.models);
  const sum = (name) => models.reduce((total, model) => total + (model[name] ?? 0), 0);
  const checked = sum("tokens_checked"), different = sum("tokens_different");
  const failed = models.filter((model) => model.failed);
  return [
    h("div", { class: "strip" }, h("div", { class: "row api" },
      fact("Model", h("span", { class: "small" }, found.model ?? "–")), fact("Sessions", number(found.sessions.length)), fact("Adapters and models", number(models.length)),
      fact("Futures in flight", number(found.futures.in_flight), `${number(found.futures.kept)} kept`), fact("Commands queued", number(sum("queued"))),
      fact("Refused for load", number(found.refused)),
      fact("Parity", !checked ? "–" : h("span", { class: different ? "bad" : "good" }, different ? `${number(different)} differ` : "exactly 0"), checked ? `of ${number(checked)} tokens` : ""))),
    ...failed.map((model) => h("div", { class: "failed", role: "alert" }, h("p", {}, h("b", {}, `${model.model_id} failed. `), typeof model.failed === "string" ? model.failed : ""))),
    found.sessions.length ? h("div", { class: "sessions" }, found.sessions.map(session)) : h("div", { class: "empty" }, h("h2", {}, "No session"), h("p", {}, "A client's session appears here as soon as it begins.")),
    details(found.service),
  ];
}

const fact = (label, value, note) => h("div", { class: "cell" }, h("span", { class: "label" }, label), h("span", { class: "value" }, value, note ? h("small", {}, note) : null));

function session(each) {
  const heading = ["Model", "Updates", "Queued", "Log", "Parity"];
  return h("article", { class: "card" },
    h("header", {}, h("h3", {}, each.name || each.session_id), h("span", { class: "unit" }, [each.name ? each.session_id : "", `client ${each.client}`, `${number(each.samplers)} sampler${each.samplers === 1 ? "" : "s"}`, each.idle_seconds < 5 ? "active" : `idle for ${duration(each.idle_seconds)}`].filter(Boolean).join(" · "))),
    each.models.length ? h("div", { class: "scroll" }, h("table", { class: "list" }, h("thead", {}, h("tr", {}, heading.map((text, column) => h("th", { scope: "col", class: column && column < 4 ? "num" : "" }, text)))),
      h("tbody", {}, each.models.map((model) => h("tr", {}, h("td", { class: "value" }, model.model_id, model.failed ? h("div", { class: "bad" }, "failed") : null),
        h("td", { class: "num" }, number(model.updates)), h("td", { class: "num" }, number(model.queued)), h("td", { class: "num" }, bytes(model.log_bytes)), h("td", {}, parity(model))))))) : h("p", { class: "muted" }, "No model: it only samples."));
}

function parity(model) {
  if (!model.tokens_checked) return h("span", { class: "muted" }, "nothing compared yet");
  return model.tokens_different ? h("span", { class: "bad" }, `${number(model.tokens_different)} of ${number(model.tokens_checked)} tokens differ`)
    : h("span", { class: "good" }, `exactly 0: ${number(model.tokens_checked)} tokens equal`);
}

// What the service tells of itself: numbers and texts, by name.
function details(service) {
  const rows = Object.entries(service ?? {}).filter(([, value]) => typeof value !== "object" || value === null);
  if (!rows.length) return "";
  return h("article", { class: "card", style: { marginTop: "12px" } }, h("header", {}, h("h3", {}, "Service")),
    h("dl", { class: "facts" }, rows.flatMap(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, typeof value === "number" ? number(value) : String(value))])));
}

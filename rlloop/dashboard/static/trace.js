// One completion: its conversation as bubbles by role, the policy's tokens coloured by what they say, its reward by turn.

import { link } from "./api.js";
import { count, h, number } from "./dom.js";
import { address } from "./state.js";

// 0 to 1, on a logarithmic scale from a difference of 1e-7 (a last bit) to 1 nat.
export const strength = (d) => (d === 0 ? 0 : Math.min(1, Math.max(0.06, (Math.log10(Math.abs(d)) + 7) / 7)));
const paint = (side, share) => `rgb(var(${side}) / ${(share < 0.02 ? 0 : 0.06 + 0.64 * Math.min(1, share)).toFixed(3)})`;

// What tokens can be coloured by. `of(token)`: null where it has none, else [side, share of the full colour].
const COLOURS = {
  difference: {
    title: "difference", has: (full) => full.compared,
    of: (token) => (token.same ? ["--low", 0] : [token.d > 0 ? "--low" : "--high", strength(token.d ?? Infinity)]),
    scale: (full) => (full.tokens.every((token) => token.same !== false) ? [h("span", { class: "good" }, "Every token has the same bits in engine and trainer.")]
      : ["less likely to the trainer", ...[1, 1e-2, 1e-4, 1e-6].map((d) => box("--high", strength(d), `|d| = ${d}`)), "equal", ...[1e-6, 1e-4, 1e-2, 1].map((d) => box("--low", strength(d), `|d| = ${d}`)), "more likely", h("span", {}, "(1 … 1e−6 nats)")]),
  },
  logprob: {
    title: "logprob", has: () => true, of: (token) => ["--high", token.engine === null ? 1 : -token.engine / 5],
    scale: () => ["certain", ...[0.02, 0.25, 0.5, 1].map((share) => box("--high", share, `logprob ${-5 * share}`)), "surprising: logprob −5 or less"],
  },
  entropy: {
    title: "entropy", has: (full) => full.tokens.some((token) => typeof token.entropy === "number"), of: (token) => (typeof token.entropy === "number" ? ["--mid", token.entropy / 3] : null),
    scale: () => ["one choice", ...[0.02, 0.33, 0.66, 1].map((share) => box("--mid", share, `${(3 * share).toFixed(1)} nats`)), "3 nats or more"],
  },
  advantage: {
    title: "advantage", has: (full) => full.tokens.some((token) => typeof token.advantage === "number"), of: (token) => (typeof token.advantage === "number" ? [token.advantage < 0 ? "--high" : "--low", Math.abs(token.advantage) / 2] : null),
    scale: () => ["made less likely: −2", ...[1, 0.5].map((share) => box("--high", share, `advantage ${-2 * share}`)), box("--low", 0, "0"), ...[0.5, 1].map((share) => box("--low", share, `advantage ${2 * share}`)), "+2: more likely"],
  },
};
const box = (side, share, title) => { const part = h("i", { title }); part.style.background = paint(side, share); return part; };

let chosen = localStorage.getItem("rlloop-colour") ?? "";
let plain = localStorage.getItem("rlloop-plain") === "yes"; // token by token, without bubbles

// The default is what says most: differences where there are any, else the logprobs.
function colourOf(full) {
  if (chosen && COLOURS[chosen].has(full)) return chosen;
  return full.compared && full.tokens.some((token) => token.same === false) ? "difference" : "logprob";
}

// Images, as the model's vision tower read them.
const pictures = (run, images, of = "the prompt") => h("div", { class: "pictures" }, images.map(({ digest, start, end }, index) => h("figure", {},
  h("img", { src: link("image", { run, digest }), alt: `Image ${index + 1} of ${of}`, onerror: (event) => event.target.replaceWith(h("span", { class: "muted" }, "no picture was kept")) }),
  h("figcaption", { title: digest }, [start === undefined ? "" : `tokens ${start} to ${end - 1}, `, digest.slice(0, 8)].join("")))));

// Elements that show a completion. `linked`: its step is a link.
export function completion(run, row, full, linked) {
  const inspector = h("div", { class: "inspector", role: "status" });
  const view = h("div");
  const draw = () => {
    const by = colourOf(full);
    const pick = h("select", { "aria-label": "Colour tokens by", onchange: (event) => { chosen = event.target.value; localStorage.setItem("rlloop-colour", chosen); draw(); } },
      Object.entries(COLOURS).filter(([, each]) => each.has(full)).map(([name, { title }]) => h("option", { value: name, selected: name === by }, title)));
    const flat = h("button", { type: "button", "aria-pressed": String(plain), onclick: () => { plain = !plain; localStorage.setItem("rlloop-plain", plain ? "yes" : "no"); draw(); } }, "Tokens only");
    view.replaceChildren(h("div", { class: "tools" }, h("label", {}, "Colour by", pick), flat),
      plain ? tokens(full, 0, full.tokens.length, by, inspector) : conversation(run, full, by, inspector),
      h("div", { class: "scale" }, COLOURS[by].scale(full)));
    inspector.replaceChildren(full.compared ? "Point at a token, or move to it by Tab, for its numbers." : "Not trained, so the trainer did not score it: there is nothing to compare.");
  };
  draw();
  return [
    h("header", {}, h("h3", {}, `Completion ${full.uid}`), linked ? h("a", { href: address("step", { of: run, step: row.step }) }, `step ${row.step}`) : null, h("span", { class: "grow" }),
      h("a", { href: address("step", { of: run, step: row.step, group: row.grp, order: "order" }) }, "its group")),
    full.images ? pictures(run, full.images.filter(({ end }) => end <= full.prompt_ids.length)) : null,
    view,
    full.has_text ? null : h("p", { class: "muted" }, "The run's folder holds no tokenizer, so tokens are shown by their ids. The text: ", h("span", { class: "mono" }, full.text)),
    inspector,
    h("div", { class: "beside" }, rewards(full), facts(full)),
  ].filter(Boolean);
}

// ---------------------------------------------------------------------------------------------- bubbles

function conversation(run, full, by, inspector) {
  const several = full.trace.filter((turn) => turn.tokens).length > 1;
  let number_ = 0;
  return h("div", { class: "talk", role: "log", "aria-label": "Conversation", tabindex: "0" }, full.trace.map((turn) => {
    const mine = Boolean(turn.tokens);
    if (mine) number_ += 1;
    const marks = mine
      ? [full.outcome === "trained" ? h("span", { class: "mark-trained" }, "trained") : h("span", { class: "muted" }, full.outcome.split(":")[0]), h("span", { class: "muted" }, count(turn.tokens[1] - turn.tokens[0], "token")),
        turn.calls.length ? h("span", { class: "calls" }, `calls ${turn.calls.join(", ")}`) : null, typeof turn.reward === "number" ? h("span", { class: "paid" }, `reward ${number(turn.reward, 3)}`, parts(turn.components)) : null]
      : [turn.read ? h("span", { class: "muted" }, "masked") : null];
    return h("section", { class: `bubble ${mine ? "policy" : turn.role}` },
      h("div", { class: "role" }, h("b", {}, mine && several ? `${title(turn.role)}, turn ${number_}` : turn.name ? `${title(turn.role)} · ${turn.name}` : title(turn.role)), ...marks),
      mine ? tokens(full, ...turn.tokens, by, inspector) : h("div", { class: "said" }, turn.text || (turn.images?.length ? null : h("span", { class: "muted" }, "empty"))),
      turn.images?.length ? pictures(run, turn.images.map((digest) => ({ digest })), "the reply") : null);
  }));
}

const title = (role) => role[0].toUpperCase() + role.slice(1);
const parts = (components) => (components && Object.keys(components).length ? ` (${Object.entries(components).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value, 3)}`).join(", ")})` : "");

function tokens(full, start, end, by, inspector) {
  return h("div", { class: "tokens", "aria-label": "Completion, token by token" }, full.tokens.slice(start, end).map((token) => tokenOf(token, full, by, inspector)));
}

function tokenOf(token, full, by, inspector) {
  const written = "engine" in token;
  const differs = full.compared && written && !token.same && by === "difference";
  const text = token.text === null ? h("span", { class: "id" }, `${token.id} `) : token.text.replaceAll("\n", "↵\n");
  const special = token.text !== null && /^<[^<>]*>$/.test(token.text.trim()) && /\||^<\/?s>|end_of|eos/.test(token.text);
  const element = h("button", { type: "button", class: `tok ${written ? "" : "other"} ${special ? "special" : ""} ${differs ? (token.d > 0 ? "more" : "less") : ""}` }, text);
  const colour = written ? COLOURS[by].of(token) : null;
  if (colour && colour[1] >= 0.02) element.style.background = paint(...colour);
  const tell = () => inspector.replaceChildren(...facts_(token, full, written));
  element.addEventListener("mouseenter", tell);
  element.addEventListener("focus", tell);
  return element;
}

function facts_(token, full, written) {
  const name = h("b", {}, token.text === null ? `id ${token.id}` : JSON.stringify(token.text));
  if (!written) return [name, ` id ${token.id}: not written by the policy, so masked`];
  const besides = [typeof token.entropy === "number" ? `entropy ${number(token.entropy, 3)}` : "", typeof token.advantage === "number" ? `advantage ${number(token.advantage, 3)}` : ""].filter(Boolean);
  return [
    name, ` id ${token.id}  ·  engine ${number(token.engine, 9)}`, full.compared ? `  ·  trainer ${number(token.trainer, 9)}` : "", besides.length ? `  ·  ${besides.join("  ·  ")}` : "",
    !full.compared ? "" : h("div", {}, token.same ? h("span", { class: "good" }, "equal bits: d is 0")
      : h("span", {}, "d = ", h("b", {}, token.d === null ? "not finite" : number(token.d, 4)), `, ratio ${token.d === null ? "not finite" : number(Math.exp(token.d), 5)}: the trainer finds it ${token.d > 0 ? "more" : "less"} likely than the engine that sampled it`)),
  ];
}

// ---------------------------------------------------------------------------------------------- facts

function facts(full) {
  return h("dl", { class: "facts" },
    ...[["Outcome", full.outcome], ["Advantage", number(full.advantage)], ["Surprise", `${number(full.surprise, 4)} nats a token`], ["Finish", full.finish_reason], ["Policy version", number(full.policy_version)],
      ["Example", full.example], ["Engine", h("span", { class: "mono", title: full.engine }, String(full.engine).slice(0, 12))],
      ["Sampling", h("span", { class: "mono", style: { whiteSpace: "normal" } }, Object.entries(full.sampling ?? {}).map(([key, value]) => `${key}=${value}`).join(" "))]].flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function rewards(full) {
  const parts = Object.entries(full.components ?? {});
  const most = Math.max(1e-9, ...parts.map(([, value]) => Math.abs(value)));
  return h("table", { class: "components" }, h("tbody", {},
    h("tr", {}, h("td", {}, h("b", {}, "Reward")), h("td", {}), h("td", {}, h("b", {}, number(full.reward)), full.solved ? h("span", { class: "good" }, "  solved") : "")),
    parts.map(([name, value]) => h("tr", {}, h("td", {}, name.replaceAll("_", " ")), h("td", {}, h("span", { class: "meter" }, h("i", { style: { width: `${(100 * Math.abs(value)) / most}%` } }))), h("td", {}, number(value))))));
}

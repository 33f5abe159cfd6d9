// What came out of the chosen runs: why one failed, results, notes and tags, and parity as one line.

import { $, ago, breakable, duration, h, number } from "./dom.js";
import { get, send } from "./api.js";
import { swatch } from "./chart.js";
import { address, lookOf, remember, shortName, state } from "./state.js";

const MANY = 3; // more runs than this have a line each

// Totals of the chosen runs, in order; {id, error} for one that cannot be read.
export const totalsOf = (runs) => Promise.all(runs.map((run) => get("totals", { run }).catch((error) => ({ id: run, error: String(error.message) }))));

// ---------------------------------------------------------------------------------------------- trouble

export function trouble(all) {
  const failed = all.filter((run) => run.status === "failed" || run.status === "parity broken").map((run) => h("div", { class: "failed", role: "alert" },
    h("p", {}, h("b", {}, `${shortName(run.id)} ${run.status === "failed" ? "failed" : "stopped: engine and trainer differ"}${run.begun ? ` after step ${number(run.step)}` : " before its first step"}`), " ",
      h("a", { href: address("certificate", { of: run.id }) }, run.status === "failed" ? "log" : "report and log")),
    run.reason ? h("pre", { class: "mono" }, run.reason) : h("p", { class: "muted" }, "Its log does not say why.")));
  const silent = all.filter((run) => run.status === "stopped").map((run) => h("div", { class: "problems", role: "status" },
    h("p", {}, h("b", {}, `${shortName(run.id)} has written nothing since ${ago(run.changed)}. `), "It was killed, or hangs; the same command resumes it.")));
  const found = all.flatMap((run) => (run.error ? [`${run.id}: ${run.error}`] : run.problems.map((text) => `${shortName(run.id)}: ${text}`)));
  const damaged = found.length ? [h("div", { class: "problems", role: "alert" }, found.slice(0, 6).map((text) => h("p", {}, text)),
    found.length > 6 ? h("p", { class: "muted" }, `and ${found.length - 6} more`) : null)] : [];
  return [...failed, ...silent, ...damaged];
}

// ---------------------------------------------------------------------------------------------- results

export function results(all, redraw) {
  const passes = all.some((run) => run.passes); // else rewards are continuous, and pass@1 says nothing
  const graded = passes && all.some((run) => JSON.stringify(run.pass) !== JSON.stringify(run.held_out)); // else it says pass@1 again
  const offline = all.every((run) => run.offline); // completions that are imitated or compared have no rewards of their own
  const [reward, solves] = all.every((run) => run.offline === "verdicts") ? ["margin", "preference accuracy"] : ["reward", "pass@1"]; // as `held_out_names`
  return h("div", { class: `strip ${all.length > MANY ? "many" : ""} ${graded ? "graded" : ""}`, "aria-label": "Results" }, all.map((run) => row(run, redraw, (graded || !passes) && `Held-out ${reward}`, passes && `Held-out ${solves}`, offline)));
}

const cell = (label, value, note) => h("div", { class: "cell", title: [note].flat().filter((part) => typeof part === "string").join(" ") },
  h("span", { class: "label" }, label), h("span", { class: "value" }, value, value === "–" ? null : h("small", {}, note)));
const course = (label, found, best = true) => cell(label, found ? number(found.last, 3) : "–", found ? [`from ${number(found.first, 3)}`, best ? `, best ${number(found.best, 3)}` : ""].join("") : null);

function row(run, redraw, reward, solves, offline) {
  const { colour, dash } = lookOf(run.id);
  if (run.error) return h("div", { class: "row" }, h("div", { class: "who" }, swatch(colour, dash), h("b", {}, breakable(run.id))));
  const progress = [run.num_steps ? `of ${number(run.num_steps)}` : "", run.seconds ? duration(run.seconds) : ""].filter(Boolean).join(", ");
  return h("div", { class: "row" },
    h("div", { class: "who" }, swatch(colour, dash), h("div", {}, h("b", {}, breakable(shortName(run.id))),
      h("div", { class: "muted" }, `${run.status}${run.mode ? `, ${run.mode}` : ""}`), notesOf(run, redraw))),
    solves ? course(solves, run.pass) : null, reward ? course(reward, run.held_out) : null,
    offline ? course("Training loss", run.loss, false) : course("Training reward", run.reward),
    course("Length", run.length, false), course("Entropy", run.entropy, false),
    cell("Parity", parityValue(run), run.tokens ? `${number(run.different)} of ${number(run.tokens)} differ${broken(run) ? " before" : ""}` : ""),
    cell("Steps", number(run.steps), progress));
}

// A run that parity stopped has no record of the step that differed.
const broken = (run) => run.status === "parity broken";
const compares = (run) => run.tokens > 0 || run.k3_max !== null || broken(run);
const exact = (run) => run.tokens > 0 && run.different === 0 && !(run.k3_max > 0) && !broken(run);
const parityValue = (run) => (!compares(run) ? "–" : exact(run) ? h("span", { class: "good" }, "exactly 0") : h("span", { class: "warn" }, run.k3_max > 0 || !broken(run) ? `KL ${number(run.k3_max, 3)}` : "differs"));

// ---------------------------------------------------------------------------------------------- notes and tags

function notesOf(run, redraw) {
  const edit = h("button", { type: "button", class: "quiet", "aria-label": `Note and tags of ${run.id}`, onclick: () => editNotes(run, redraw) }, run.note || run.tags.length ? "✎" : "✎ note, tags");
  return h("div", { class: "notes" }, run.tags.map((tag) => h("span", { class: "tag" }, tag)), run.note ? h("span", { class: "note", title: run.note }, run.note) : null, edit);
}

function editNotes(run, redraw) {
  const dialog = $("notes");
  const note = h("textarea", { rows: 5, "aria-label": "Note", placeholder: "What this run is for, and what came of it" });
  note.value = run.note;
  const tags = h("input", { type: "text", "aria-label": "Tags", placeholder: "tags, separated by commas", value: run.tags.join(", ") });
  const wrong = h("p", { class: "bad", role: "alert" });
  const save = async (event) => {
    event.preventDefault();
    try {
      const saved = await send("notes", { run: run.id }, { note: note.value, tags: tags.value.split(",") });
      Object.assign(state.runs.get(run.id) ?? {}, saved);
      dialog.close();
      redraw();
    } catch (error) { wrong.textContent = error.message; }
  };
  dialog.replaceChildren(h("form", { method: "dialog", onsubmit: save }, h("h2", { id: "notes-title" }, shortName(run.id)),
    h("label", {}, "Note", note), h("label", {}, "Tags", tags), h("p", { class: "muted" }, "Kept in the run's folder, in notes.json. The filter at the left finds runs by both."), wrong,
    h("div", { class: "tools" }, h("button", { type: "submit", class: "main" }, "Save"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  dialog.showModal();
}

// ---------------------------------------------------------------------------------------------- parity

// One line: green while no token differs, and then its panels are folded away.
export class ParityLine {
  constructor(grid) {
    this.grid = grid;
    this.verdict = h("span", { class: "verdict" });
    this.button = h("button", { type: "button", class: "parity-line", onclick: () => { state.parity = this.open ? "closed" : "open"; remember(); this.fold(); } }, this.verdict);
    this.heading = h("h2", {}, this.button);
    this.differs = false;
    this.fold();
  }

  get open() { return state.parity ? state.parity === "open" : this.differs; }

  fold() {
    this.grid.hidden = !this.open;
    this.button.setAttribute("aria-expanded", String(this.open));
  }

  show(all) {
    const compared = all.filter((run) => !run.error && compares(run));
    const bad = compared.filter((run) => !exact(run));
    const tokens = compared.reduce((sum, run) => sum + run.tokens, 0), different = compared.reduce((sum, run) => sum + run.different, 0);
    this.differs = bad.length > 0;
    const named = compared.length > 1 ? `, in ${bad.map((run) => shortName(run.id)).join(", ")}` : "";
    const [mark, text, more] = !compared.length ? ["none", "Parity", "nothing compared yet"]
      : !bad.length ? ["zero", "Parity: exactly 0", `${number(tokens)} trained tokens compared between engine and trainer; none differs in a bit`]
        : !different && bad.every(broken) ? ["differs", "Parity: engine and trainer differ", `in the step that was stopped${named}; none of the ${number(tokens)} tokens compared before`]
          : ["differs", `Parity: ${number(different)} of ${number(tokens)} tokens differ`, `KL up to ${number(Math.max(...bad.map((run) => run.k3_max ?? 0)), 3)} nats${named}`];
    this.verdict.replaceChildren(h("i", { class: `mark ${mark}`, "aria-hidden": "true" }, { none: "–", zero: "✓", differs: "≠" }[mark]), h("b", {}, text), h("span", { class: "muted" }, more));
    this.button.className = `parity-line ${mark}`;
    this.fold();
  }
}

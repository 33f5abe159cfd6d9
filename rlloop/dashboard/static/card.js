// A panel's card: its chart or table, its menu, and its place on the page.

import { $, h, number, show, virtualTable } from "./dom.js";
import { link, load } from "./api.js";
import { Chart, swatch } from "./chart.js";
import { saveChart } from "./export.js";
import { Histogram } from "./histogram.js";
import { menuButton } from "./menu.js";
import { AXES, seriesOf } from "./series.js";
import { go, remember, shortName, slug, state } from "./state.js";

export const loose = new Set(); // cards in dialogs, which also follow a live run
const TALL = 300; // pixels: higher charts stand alone
export const height = () => (innerWidth < 600 ? 132 : 168);

export class Card {
  // `place`: {arrange(slug, what)}, which moves, pins and hides; none for a card in a dialog.
  constructor(panel, place = null, tall = height()) {
    Object.assign(this, { panel, place, height: tall, slug: slug(panel), stale: true, visible: false, table: state.tables });
    this.chips = h("div", { class: "chips", "aria-live": "off" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": `${panel.title}: ${panel.about} Arrow keys move, Enter opens the step, t shows the table.`, style: { minHeight: `${tall}px` } });
    this.tableButton = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.setTable(!this.table) }, "Table");
    const title = h("h3", { title: panel.about, draggable: place ? "true" : "false" }, panel.title);
    this.element = h("article", { class: "card", "data-panel": panel.title, "data-slug": this.slug },
      h("header", {}, title, h("span", { class: "unit" }, [panel.unit, panel.run && state.chosen.length > 1 ? `of ${shortName(panel.run)}` : ""].filter(Boolean).join(", ")),
        h("div", { class: "actions" }, this.tableButton, menuButton("⋯", `More on ${panel.title}`, () => this.menu()))),
      this.chips, this.plot);
    const options = { height: tall, onvalues: (place, values) => this.values(place, values), onstep: (run, step) => go("step", { of: run, step }) };
    this.chart = panel.kind === "histogram" ? new Histogram(this.plot, panel, options) : new Chart(this.plot, panel, options);
    this.plot.addEventListener("keydown", (event) => this.key(event));
    if (place) this.draggable(title);
  }

  destroy() { this.chart.destroy(); }

  get pinned() { return state.pin.includes(this.slug); }

  menu() {
    const lines = this.panel.kind !== "histogram";
    return [
      this.place && { text: "Enlarge", note: "e", act: () => this.enlarge() },
      lines && this.panel.kind !== "stack" && { text: state.log.includes(this.slug) === ["log", "symlog"].includes(this.panel.scale) ? "Logarithmic scale" : "Linear scale", note: "l", act: () => this.toggleLog() },
      ...(this.place ? [
        { text: this.pinned ? "Unpin" : "Pin to the top", note: "p", act: () => this.place.arrange(this.slug, "pin") },
        { text: "Move back", note: "<", act: () => this.place.arrange(this.slug, -1) },
        { text: "Move on", note: ">", act: () => this.place.arrange(this.slug, 1) },
        { text: "Hide", note: "h", act: () => this.place.arrange(this.slug, "hide") },
      ] : []),
      { text: "Save" },
      { text: "PNG", act: () => saveChart(this.chart, "png") },
      { text: "SVG", act: () => saveChart(this.chart, "svg") },
      { text: "CSV", href: link("series.csv", { run: this.panel.run ?? state.chosen, name: this.panel.metrics, title: this.panel.title }) },
    ].filter(Boolean);
  }

  toggleLog() {
    state.log = state.log.includes(this.slug) ? state.log.filter((each) => each !== this.slug) : [...state.log, this.slug];
    remember();
    this.refresh();
  }

  draggable(title) {
    title.addEventListener("dragstart", (event) => { event.dataTransfer.setData("text/x-panel", this.slug); event.dataTransfer.effectAllowed = "move"; });
    this.element.addEventListener("dragover", (event) => { if (event.dataTransfer.types.includes("text/x-panel")) { event.preventDefault(); this.element.classList.add("target"); } });
    for (const leave of ["dragleave", "drop"]) this.element.addEventListener(leave, () => this.element.classList.remove("target"));
    this.element.addEventListener("drop", (event) => { const from = event.dataTransfer.getData("text/x-panel"); if (from && from !== this.slug) { event.preventDefault(); this.place.arrange(from, this.slug); } });
  }

  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (by) this.chart.move(event.shiftKey ? by * 10 : by);
    else if (event.key === "Enter") this.chart.openStep();
    else if (event.key === "+" || event.key === "-") this.chart.zoom?.(event.key === "+" ? 0.5 : 2);
    else if (event.key === "e" && this.place) this.enlarge();
    else if (event.key === "l") this.toggleLog();
    else if (event.key === "t") { this.setTable(!this.table); this.plot.focus(); }
    else if (this.place && { p: 1, h: 1, "<": 1, ">": 1 }[event.key]) this.place.arrange(this.slug, { p: "pin", h: "hide", "<": -1, ">": 1 }[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  async refresh() {
    this.stale = false;
    const axis = AXES[state.axis].metric;
    const names = this.panel.kind === "histogram" ? ["parity/tokens"] : [...this.panel.metrics, ...(this.panel.kind === "stack" ? ["time/step"] : []), ...(axis ? [axis] : [])];
    try {
      await Promise.all((this.panel.run ? [this.panel.run] : state.chosen).map((run) => load(run, names)));
    } catch (error) {
      this.plot.replaceChildren(h("p", { class: "bad" }, error.message));
      return;
    }
    if (!this.plot.isConnected) return;
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
    if (this.visible || this.height > TALL) this.refresh();
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
    const tables = uPlot.join(series.map((line) => [line.steps, line.raw]));
    this.plot.replaceChildren(virtualTable(["step", ...series.map((line) => line.label || line.metric)], tables[0].length,
      (index) => [number(tables[0][index]), ...series.map((_, column) => show(tables[column + 1][index] ?? NaN, this.panel))], { height: this.height, label: this.panel.title }));
    this.values(null, series.map((line) => ({ ...line, value: line.raw[line.raw.length - 1] })));
  }

  values(place, all) {
    const values = state.chosen.length > 1 && this.height <= TALL ? all.filter((line) => !line.beneath) : all;
    const at = place === null ? null : h("span", { class: "chip" }, place);
    const few = values.slice(0, this.height > TALL ? 40 : this.panel.run ? 10 : 6);
    this.chips.replaceChildren(...[at, ...few.map((line) => h("span", { class: "chip" },
      values.length > 1 || state.chosen.length > 1 ? swatch(line.colour, this.panel.run ? [] : line.dash, 18) : null,
      line.label ? h("span", { class: "who", title: line.label }, line.label) : null, h("b", {}, line.text ?? show(line.value, this.panel)))),
      values.length > few.length ? h("span", {}, `+${values.length - few.length}`) : null].filter(Boolean));
  }

  enlarge() {
    const dialog = $("large");
    const card = new Card(this.panel, null, Math.round(innerHeight * 0.58));
    dialog.replaceChildren(card.element, h("p", { class: "about" }, this.panel.about, " ", h("span", { class: "mono" }, this.panel.metrics.join("  "))),
      h("form", { method: "dialog" }, h("button", {}, "Close")));
    dialog.addEventListener("close", () => { loose.delete(card); card.destroy(); dialog.replaceChildren(); }, { once: true });
    dialog.showModal();
    card.visible = true;
    loose.add(card);
    card.refresh().then(() => card.plot.focus());
  }
}

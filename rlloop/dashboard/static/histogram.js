// Histogram of tokens by log ratio, at one step (SVG). Follows the charts' cursor.

import { h, number, percent, svg } from "./dom.js";
import { cached, get } from "./api.js";
import { all } from "./chart.js";
import { briefName, css, lookOf, state } from "./state.js";

export class Histogram {
  constructor(host, panel, { height = 168, onvalues = () => {}, onstep = () => {} } = {}) {
    Object.assign(this, { host, panel, height, onvalues, onstep, extent: [0, 1], step: null, found: [] });
    all.add(this);
  }

  destroy() { all.delete(this); }
  move(by) { this.draw(Math.max(0, (this.step ?? 0) + by)); }
  openStep() { if (this.found.length) this.onstep(this.found[0].run, this.found[0].step); }

  // A step's counts, or the newest ones.
  async draw(step = null) {
    this.asked = step;
    const [metric] = this.panel.metrics;
    const found = [];
    for (const run of state.chosen) {
      const steps = cached(run, "parity/tokens")?.steps ?? [];
      const newest = steps.length ? steps[steps.length - 1] : null;
      if (newest === null) continue;
      const at = step === null ? newest : Math.min(step, newest);
      const { record } = await get("record", { run, step: at });
      if (this.asked !== step) return; // the cursor went on
      if (record?.[metric]) found.push({ run, step: at, ess: record["is/ess"], ...record[metric], ...lookOf(run) });
    }
    this.step = found[0]?.step ?? step;
    this.found = found;
    this.host.replaceChildren(found.length ? histogram(found, this.host.clientWidth || 300, this.height) : h("p", { class: "muted" }, "No histogram at this step."));
    this.onvalues(found.length && found.every((each) => each.step === this.step) ? `step ${number(this.step)}` : null, found.map(({ run, colour, dash, counts, edges, ess }) => {
      const total = counts.reduce((sum, count) => sum + count, 0);
      const middle = counts[edges.findIndex((edge) => edge > 0)] ?? 0;
      const parts = [found.length > 1 ? "" : `${percent(middle / total)} within 1e−6`, ess === undefined ? "" : `ESS ${percent(ess)}`];
      return { run, colour, dash, label: state.chosen.length > 1 ? briefName(run) : "", text: parts.filter(Boolean).join(", ") };
    }));
  }
}

// `found`: [{edges, counts, colour, dash}]. Heights are logarithmic, so that one token in a million is visible.
export function histogram(found, width, height) {
  const left = 44, bottom = 22, top = 8, right = 8;
  const [{ edges, counts }] = found;
  const inner = width - left - right, tall = height - top - bottom;
  const totals = found.map((each) => each.counts.reduce((sum, count) => sum + count, 0));
  const floor = Math.min(-3, ...totals.map((total) => Math.floor(Math.log10(0.5 / Math.max(1, total)))));
  const x = (index) => left + (index / counts.length) * inner;
  const y = (share) => top + (share > 0 ? Math.min(1, Math.log10(share) / floor) : 1) * tall;
  const box = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "histogram", role: "img", "aria-label": "Histogram of the log ratio, trainer minus engine" });
  const text = (content, at, line, anchor = "middle") => {
    const element = svg("text", { x: at, y: line, "text-anchor": anchor, fill: css("--faint"), "font-size": 11 });
    element.textContent = content;
    box.append(element);
  };
  for (let power = 0; power >= floor; power -= Math.ceil(-floor / 4)) {
    const line = y(10 ** power);
    box.append(svg("line", { x1: left, x2: width - right, y1: line, y2: line, stroke: css("--line") }));
    text(power === 0 ? "100 %" : percent(10 ** power), left - 5, line + 4, "end");
  }
  const middle = edges.findIndex((edge) => edge > 0);
  for (const edge of [-1, -1e-3, 1e-3, 1]) {
    const index = edges.findIndex((each) => Math.abs(each - edge) < Math.abs(edge) * 1e-6);
    if (index >= 0) text(number(edge), x(index + 1), height - 6);
  }
  text("0", x(middle + 0.5), height - 6);
  found.forEach((each, order) => {
    const bars = found.length === 1;
    let path = `M${x(0)},${y(0)}`;
    each.counts.forEach((count, index) => {
      const line = y(count / totals[order]);
      if (bars && count) box.append(svg("rect", { x: x(index) + 0.5, y: line, width: Math.max(1, inner / counts.length - 1), height: top + tall - line, fill: index === middle ? css("--good") : each.colour, rx: 1.5 }));
      path += `V${line}H${x(index + 1)}`;
    });
    if (!bars) box.append(svg("path", { d: `${path}V${y(0)}`, fill: "none", stroke: each.colour, "stroke-width": 1.8, "stroke-dasharray": each.dash.join(" ") }));
  });
  return box;
}

// One chart: lines or a stack over steps (uPlot), or a histogram of one step (SVG).

import { h, number, percent, show, svg } from "./dom.js";
import { cached, get } from "./api.js";
import { css, look, lookOf, lookOfSeries, points, shortName, state } from "./state.js";

const all = new Set(); // every chart on the page: they share zoom and cursor
const sync = uPlot.sync("steps");

export function setRange(range) {
  state.range = range;
  for (const chart of all) chart.plot?.setScale("x", { min: range ? range[0] : chart.extent[0], max: range ? range[1] : chart.extent[1] });
}

// Histograms follow the cursor of the other charts, a moment later.
let hovering, hovered = null;
function hover(step) {
  if (step === hovered) return;
  hovered = step;
  clearTimeout(hovering);
  hovering = setTimeout(() => { for (const chart of all) if (chart instanceof Histogram && chart.found) chart.draw(step); }, 120);
}

export const swatch = (colour, dash, width = 28) => {
  const line = svg("line", { x1: 1, x2: width - 1, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.4, "stroke-dasharray": dash.join(" ") });
  const box = svg("svg", { viewBox: `0 0 ${width} 10`, class: "swatch", "aria-hidden": "true" }, line);
  box.style.width = `${width}px`;
  return box;
};

const short = (name) => name.slice(name.indexOf("/") + 1).replaceAll("_", " ");

// What a panel draws: one entry a run and metric that has points.
export function seriesOf(panel) {
  const runs = panel.kind === "stack" ? state.chosen.slice(0, 1) : state.chosen;
  const found = [];
  for (const run of runs) {
    for (const metric of panel.metrics) {
      const column = cached(run, metric);
      if (!column) continue;
      const data = points(column, panel.kind === "stack" ? 0 : state.smooth);
      if (!data.xs.length) continue;
      const stack = panel.kind === "stack";
      const label = [panel.metrics.length > 1 || panel.named ? short(metric) : "", state.chosen.length > 1 && !stack ? shortName(run) : ""].filter(Boolean).join(" · ");
      found.push({ run, metric, label, ...(stack ? look(panel.metrics.indexOf(metric)) : lookOfSeries(run, metric, panel.metrics)), ...data });
    }
  }
  return found;
}

export class Chart {
  constructor(host, panel, { height = 168, onvalues = () => {}, onstep = () => {} } = {}) {
    Object.assign(this, { host, panel, height, onvalues, onstep, series: [], extent: [0, 1] });
    all.add(this);
    this.observer = new ResizeObserver(() => this.plot && this.plot.width !== host.clientWidth && this.plot.setSize({ width: host.clientWidth, height: this.height }));
    this.observer.observe(host);
  }

  destroy() {
    all.delete(this);
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  draw() {
    this.series = seriesOf(this.panel);
    const lines = this.panel.kind === "stack" ? stacked(this.series, this.panel) : this.series;
    if (!lines.length) return;
    const data = uPlot.join(lines.map((line) => [line.xs, line.ys]));
    const xs = data[0];
    this.extent = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 0.5, xs[0] + 0.5];
    const appearance = JSON.stringify([state.chosen, lines.map((line) => [line.run, line.metric, line.colour]), document.documentElement.dataset.theme, this.height]);
    if (this.plot && this.appearance === appearance) {
      const left = this.plot.cursor.left;
      this.plot.setData(data, false);
      const [min, max] = state.range ?? this.extent;
      this.plot.setScale("x", { min, max });
      if (left < 0) this.values(null);
      return;
    }
    this.appearance = appearance;
    this.plot?.destroy();
    this.lines = lines;
    this.plot = new uPlot(this.options(lines), data, this.host);
    this.plot.over.addEventListener("click", () => this.openStep());
    this.plot.over.addEventListener("dblclick", () => setRange(null));
    this.values(null);
  }

  openStep() {
    const index = this.plot?.cursor.idx;
    if (index === null || index === undefined || !this.series.length) return;
    const step = this.plot.data[0][index];
    const near = this.series.find((line) => line.xs.includes(step)) ?? this.series[0];
    this.onstep(near.run, step);
  }

  move(by) {
    const plot = this.plot;
    if (!plot) return;
    const last = plot.data[0].length - 1;
    const now = plot.cursor.idx ?? (by < 0 ? last + 1 : -1);
    const index = Math.min(last, Math.max(0, now + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
  }

  // The numbers at a step, or the newest ones.
  values(step) {
    this.onvalues(step, this.series.map((line) => {
      let at = line.xs.length - 1;
      if (step !== null) {
        let low = 0;
        while (low < at) { const middle = (low + at + 1) >> 1; if (line.xs[middle] <= step) low = middle; else at = middle - 1; }
        if (line.xs[at] > step) return { ...line, value: NaN };
      }
      return { ...line, value: line.raw[at] };
    }));
  }

  options(lines) {
    const stack = this.panel.kind === "stack";
    const pixels = this.panel.metrics.length && lines.length ? Math.max(...lines.map((line) => line.xs.length)) : 0;
    return {
      width: this.host.clientWidth || 300,
      height: this.height,
      padding: [8, this.panel.guides.some((value) => value !== 0 && value !== 1) ? 40 : 10, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: sync.key, setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6, width: 1.5 },
        y: false,
        bind: { dblclick: () => () => null },
      },
      series: [{}, ...lines.map((line) => ({
        stroke: line.colour,
        width: stack ? 0.8 : pixels > 400 ? 1.2 : 1.6,
        dash: stack || !line.dash.length ? undefined : line.dash,
        fill: stack ? `${line.colour}b0` : undefined,
        points: stack ? { show: false } : { show: pixels < 40, size: 4.5, fill: line.colour },
      }))],
      bands: stack ? lines.slice(1).map((_, index) => ({ series: [index + 1, index + 2] })) : [],
      scales: { x: { time: false, range: (_, min, max) => state.range ?? (min === max ? [min - 0.5, max + 0.5] : [min, max]) }, y: scaleOf(this.panel) },
      axes: [
        { stroke: css("--faint"), grid: { show: false }, ticks: { show: false }, font: `11px ${css("--sans")}`, size: 24, gap: 3 },
        { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `11px ${css("--sans")}`, gap: 4,
          size: (plot, values) => Math.max(38, 10 + Math.max(0, ...(values ?? []).map((text) => (text ?? "").length)) * 6.4),
          ...axisOf(this.panel, Math.max(2, Math.floor((this.height - 40) / 20))) },
      ],
      hooks: {
        drawAxes: [(plot) => this.guides(plot)],
        draw: [(plot) => this.marks(plot)],
        setCursor: [(plot) => {
          const { idx, left } = plot.cursor;
          const step = idx === null || idx === undefined || left < 0 ? null : plot.data[0][idx];
          this.values(step);
          hover(step);
        }],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width > 8) setRange([Math.floor(plot.posToVal(left, "x")), Math.ceil(plot.posToVal(left + width, "x"))]);
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    };
  }

  guides(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.font = `${10.5 * devicePixelRatio}px ${css("--sans")}`;
    ctx.textAlign = "left";
    let labelled = Infinity;
    for (const value of this.panel.guides) {
      if (value < plot.scales.y.min || value > plot.scales.y.max) continue;
      const y = Math.round(plot.valToPos(value, "y", true)) + 0.5;
      ctx.strokeStyle = value === 0 ? css("--good") : css("--warn");
      ctx.globalAlpha = 0.75;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(value === 0 ? [] : [3 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      if (value !== 0 && value !== 1 && labelled - y > 11 * devicePixelRatio) {
        labelled = y;
        ctx.globalAlpha = 1;
        ctx.fillStyle = css("--warn");
        ctx.fillText(number(value), bbox.left + bbox.width + 4 * devicePixelRatio, y + 3.5 * devicePixelRatio);
      }
    }
    ctx.restore();
  }

  // A number that is not finite has no place on the axis: a cross at the top says that it was there.
  marks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = css("--bad");
    ctx.lineWidth = 1.6 * devicePixelRatio;
    for (const line of this.series) {
      line.raw.forEach((value, index) => {
        if (Number.isFinite(value)) return;
        const x = plot.valToPos(line.xs[index], "x", true), y = bbox.top + 6 * devicePixelRatio, r = 3.5 * devicePixelRatio;
        if (x < bbox.left || x > bbox.left + bbox.width) return;
        ctx.beginPath();
        ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r); ctx.moveTo(x + r, y - r); ctx.lineTo(x - r, y + r);
        ctx.stroke();
      });
    }
    ctx.restore();
  }
}

// Each line on top of those below it, the top one first; of a step's time, what no phase claims is waiting.
function stacked(series, panel) {
  if (!series.length) return [];
  const tables = uPlot.join(series.map((line) => [line.xs, line.ys]));
  const xs = tables[0];
  const sums = new Float64Array(xs.length);
  const lines = series.map((line, index) => {
    const ys = Array.from(xs, (_, at) => (sums[at] += tables[index + 1][at] ?? 0));
    return { ...line, xs, ys };
  });
  const whole = panel.metrics[0].startsWith("time/") && cached(series[0].run, "time/step");
  if (whole) {
    const { xs: steps, ys } = points(whole);
    const at = new Map(steps.map((step, index) => [step, ys[index]]));
    const top = Array.from(xs, (step, index) => Math.max(sums[index], at.get(step) ?? 0));
    lines.push({ run: series[0].run, metric: "waiting", colour: css("--faint"), dash: [], xs, ys: top });
  }
  return lines.reverse();
}

function scaleOf(panel) {
  const guides = panel.guides;
  const bounds = (min, max) => [Math.min(min ?? 0, ...guides), Math.max(max ?? 0, ...guides)];
  if (panel.scale === "symlog") {
    return {
      distr: 4, asinh: panel.threshold,
      range: (_, min, max) => {
        const [low, high] = bounds(min, max);
        return [low < 0 ? low * 2 : -panel.threshold * 1.2, high > 0 ? Math.max(high * 2, panel.threshold * 10) : panel.threshold * 1e3];
      },
    };
  }
  if (panel.scale === "log") {
    return { distr: 3, range: (_, min, max) => {
      const [low, high] = [Math.min(min ?? 1, ...guides), Math.max(max ?? 1, ...guides)];
      return low < high ? [low / 1.3, high * 1.3] : [low / 2, high * 2];
    } };
  }
  if (panel.scale === "linear") {
    return { range: (_, min, max) => {
      const [low, high] = guides.length ? bounds(min, max) : [min ?? 0, max ?? 1];
      const pad = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
      return [low - pad, high + pad];
    } };
  }
  return { range: (_, min, max) => {
    const [low, high] = bounds(min, max);
    const top = high > 0 ? high : panel.scale === "fraction" ? 0.01 : 1;
    return [Math.min(low, 0) - top * 0.03, top * 1.08];
  } };
}

function axisOf(panel, room) {
  if (panel.scale === "symlog") {
    return {
      filter: (_, ticks) => ticks,
      splits: (plot) => {
        const { min, max } = plot.scales.y;
        const decades = [];
        for (let power = Math.round(Math.log10(panel.threshold)) + 1; power <= 6; power += 1) decades.push(Number(`1e${power}`));
        const ticks = [...decades.map((value) => -value).reverse(), 0, ...decades].filter((value) => value >= min && value <= max);
        const power = (value) => Math.round(Math.log10(Math.abs(value)));
        const every = [1, 2, 3, 4, 6].find((gap) => ticks.filter((value) => value === 0 || power(value) % gap === 0).length <= room) ?? 8;
        return ticks.filter((value) => value === 0 || power(value) % every === 0);
      },
      values: (_, ticks) => ticks.map((value) => (value === 0 ? "0" : number(value))),
    };
  }
  if (panel.scale === "log") {
    return {
      filter: (_, ticks) => ticks,
      splits: (plot) => {
        const { min, max } = plot.scales.y;
        const ticks = [];
        for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++) for (const digit of max / min < 30 ? [1, 2, 5] : [1]) ticks.push(Number(`${digit}e${power}`));
        const every = Math.ceil(ticks.length / room);
        return ticks.filter((value, index) => value >= min && value <= max && (value === 1 || index % every === 0));
      },
      values: (_, ticks) => ticks.map((value) => compact(value)),
    };
  }
  if (panel.scale === "fraction") return { values: (_, ticks) => ticks.map((value) => (value < 0 ? "" : percent(value))) };
  return { values: (_, ticks) => ticks.map((value) => (value === null ? "" : compact(value))) };
}

const compact = (value) => {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit * 1.0001) return `${Number((value / unit).toPrecision(3))}${letter}`;
  return number(value, 3);
};

// Tokens by log-ratio, one step. A logarithmic height, since one token of a million is to be seen too.
export class Histogram {
  constructor(host, panel, { height = 168, onvalues = () => {} } = {}) {
    Object.assign(this, { host, panel, height, onvalues, extent: [0, 1], step: null, shown: "" });
    all.add(this);
  }

  destroy() { all.delete(this); }
  move(by) { this.step = Math.max(0, (this.step ?? 0) + by); this.draw(this.step); }
  openStep() {}

  async draw(step = null) {
    const [metric] = this.panel.metrics;
    const found = [];
    for (const run of state.chosen) {
      const steps = cached(run, "parity/tokens")?.steps ?? cached(run, "time/step")?.steps;
      const newest = steps?.length ? steps[steps.length - 1] : null;
      const at = step === null ? newest : Math.min(step, newest ?? step);
      if (at === null) continue;
      const { record } = await get("record", { run, step: at });
      if (record?.[metric]) found.push({ run, step: at, ...record[metric], ...lookOf(run) });
    }
    this.step = found[0]?.step ?? null;
    this.found = found;
    this.host.replaceChildren(found.length ? histogram(found, this.host.clientWidth || 300, this.height) : h("p", { class: "muted" }, "No histogram at this step."));
    this.onvalues(this.step, found.map(({ run, colour, dash, counts, edges }) => {
      const total = counts.reduce((sum, count) => sum + count, 0);
      const middle = counts[edges.findIndex((edge) => edge > 0)] ?? 0;
      return { run, colour, dash, label: state.chosen.length > 1 ? shortName(run) : "", value: middle / total, text: `${percent(middle / total)} within 1e−6` };
    }));
  }
}

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

export { show };

// One chart: lines or a stack over steps, time or tokens (uPlot).

import { h, number, svg } from "./dom.js";
import { axisOf, compact, scaleOf, scaledAs } from "./scales.js";
import { AXES, seriesOf } from "./series.js";
import { css, remember, slug, state } from "./state.js";

export const all = new Set(); // every chart on the page: they share zoom and cursor
const sync = uPlot.sync("steps");

export function setRange(range) {
  state.range = range;
  remember();
  for (const chart of all) chart.plot?.setScale("x", { min: range ? range[0] : chart.extent[0], max: range ? range[1] : chart.extent[1] });
}

// Histograms follow the cursor of the other charts, a moment later.
let hovering, hovered = null;
function hover(step) {
  if (step === hovered) return;
  hovered = step;
  clearTimeout(hovering);
  hovering = setTimeout(() => { for (const chart of all) if (chart.panel.kind === "histogram" && chart.host.isConnected && chart.found.length) chart.draw(step); }, 120);
}

export const swatch = (colour, dash, width = 28) => {
  const line = svg("line", { x1: 1, x2: width - 1, y1: 5, y2: 5, stroke: colour, "stroke-width": 2.4, "stroke-dasharray": dash.join(" ") });
  const box = svg("svg", { viewBox: `0 0 ${width} 10`, class: "swatch", "aria-hidden": "true" }, line);
  box.style.width = `${width}px`;
  return box;
};

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
    if (!this.series.length) { this.host.replaceChildren(h("p", { class: "muted" }, "No numbers here.")); this.onvalues(null, []); return; }
    this.drawnAs = scaledAs(this.panel, state.log.includes(slug(this.panel)), this.series);
    const faint = this.panel.kind === "lines" ? this.series.filter((line) => line.beneath || (state.smooth && !this.panel.beneath.length)).map((line) => ({ ...line, ys: line.raw.map((value) => (Number.isFinite(value) ? value : null)), colour: `${line.colour.slice(0, 7)}${line.beneath ? "26" : "38"}`, dash: [], pale: true })) : [];
    const order = [...this.series.filter((line) => line.beneath), ...this.series.filter((line) => !line.beneath)];
    const lines = this.panel.kind === "stack" ? [...this.series].reverse() : [...faint, ...order]; // the top one first
    this.steps = new Map(this.series.flatMap((line) => line.xs.map((x, index) => [x, line.steps[index]])));
    this.lines = lines;
    const data = uPlot.join(lines.map((line) => [line.xs, line.ys]));
    const xs = data[0];
    this.extent = xs.length > 1 ? [xs[0], xs[xs.length - 1]] : [xs[0] - 0.5, xs[0] + 0.5];
    const appearance = JSON.stringify([state.chosen, lines.map((line) => [line.run, line.metric, line.colour]), document.documentElement.dataset.theme, this.height, state.axis, this.drawnAs.scale, this.drawnAs.threshold]);
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
    this.host.replaceChildren();
    this.plot = new uPlot(this.options(lines), data, this.host);
    this.plot.over.addEventListener("click", () => this.openStep());
    this.plot.over.addEventListener("dblclick", () => setRange(null));
    this.values(null);
  }

  openStep() {
    const index = this.plot?.cursor.idx;
    if (index === null || index === undefined || !this.series.length) return;
    const x = this.plot.data[0][index];
    const near = this.series.find((line) => line.xs.includes(x)) ?? this.series[0];
    this.onstep(near.run, this.steps.get(x));
  }

  move(by) {
    const plot = this.plot;
    if (!plot) return;
    const last = plot.data[0].length - 1;
    const now = plot.cursor.idx ?? (by < 0 ? last + 1 : -1);
    const index = Math.min(last, Math.max(0, now + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
  }

  // Zoom, around the step under the cursor or in the middle.
  zoom(by) {
    if (!this.plot) return;
    const [first, last] = state.range ?? this.extent;
    const middle = this.plot.data[0][this.plot.cursor.idx] ?? (first + last) / 2;
    const whole = state.axis === "step";
    const half = Math.max(whole ? 1 : 1e-6, ((last - first) * by) / 2);
    const range = [Math.max(this.extent[0], whole ? Math.floor(middle - half) : middle - half), Math.min(this.extent[1], whole ? Math.ceil(middle + half) : middle + half)];
    setRange(range[0] <= this.extent[0] && range[1] >= this.extent[1] ? null : range);
  }

  // Values at a place of the axis, or the newest ones.
  values(x) {
    this.onvalues(x === null ? null : AXES[state.axis].tell(x), this.series.map((line) => {
      let at = line.xs.length - 1;
      if (x !== null) {
        let low = 0;
        while (low < at) { const middle = (low + at + 1) >> 1; if (line.xs[middle] <= x) low = middle; else at = middle - 1; }
        if (line.xs[at] > x) return { ...line, value: NaN };
      }
      return { ...line, value: line.raw[at] };
    }));
  }

  options(lines) {
    const stack = this.panel.kind === "stack";
    const most = Math.max(...lines.map((line) => line.xs.length));
    const labelled = this.panel.guides.some((value) => value !== 0 && value !== 1);
    return {
      width: this.host.clientWidth || 300,
      height: this.height,
      padding: [8, labelled ? 40 : 8 + 3 * number(this.extent[1]).length, 0, 0],
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
        width: stack ? 0.8 : line.beneath || line.pale || most > 400 ? 1.2 : 1.6,
        dash: stack || !line.dash.length ? undefined : line.dash,
        fill: stack ? `${line.colour}b0` : undefined,
        points: stack || line.beneath || line.pale ? { show: false } : { show: line.xs.length < 40, size: 4.5, fill: line.colour },
      }))],
      bands: stack ? lines.slice(1).map((_, index) => ({ series: [index + 1, index + 2] })) : [],
      scales: { x: { time: false, range: (_, min, max) => state.range ?? (min === max ? [min - 0.5, max + 0.5] : [min, max]) }, y: scaleOf(this.drawnAs) },
      axes: [
        { stroke: css("--faint"), grid: { show: false }, ticks: { show: false }, font: `11px ${css("--sans")}`, size: 24, gap: 3, incrs: AXES[state.axis].ticks,
          values: (_, ticks) => ticks.map((value, index) => (state.axis === "tokens" ? compact(value) : state.axis === "time" ? AXES.time.tick(value) : index ? number(value) : AXES.step.tell(value))) },
        { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: `11px ${css("--sans")}`, gap: 4,
          size: (plot, values) => Math.max(38, 10 + Math.max(0, ...(values ?? []).map((text) => (text ?? "").length)) * 6.4),
          ...axisOf(this.drawnAs, Math.max(2, Math.floor((this.height - 40) / 20))) },
      ],
      hooks: {
        drawAxes: [(plot) => this.guides(plot)],
        draw: [(plot) => this.marks(plot)],
        setCursor: [(plot) => {
          const { idx, left } = plot.cursor;
          const x = idx === null || idx === undefined || left < 0 ? null : plot.data[0][idx];
          this.values(x);
          hover(x === null ? null : this.steps.get(x) ?? null);
        }],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          const round = state.axis === "step" ? [Math.floor, Math.ceil] : [Number, Number];
          if (width > 8) setRange([round[0](plot.posToVal(left, "x")), round[1](plot.posToVal(left + width, "x"))]);
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
    for (const value of this.drawnAs.guides) {
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

  // A number that is not finite is drawn as a cross at the top.
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

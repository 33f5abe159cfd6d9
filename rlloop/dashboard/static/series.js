// The numbers that a chart draws: each run's metrics over steps, time or tokens; smoothed, or stacked.

import { duration, number } from "./dom.js";
import { cached } from "./api.js";
import { briefName, css, look, lookOf, lookOfSeries, state } from "./state.js";

const BENEATH = 0.9; // smoothing, at least, of metrics that are drawn beneath others

// The axes that charts can be drawn over. `metric` is added up over the steps.
export const AXES = {
  step: { title: "Steps", tell: (x) => `step ${number(x)}`, ticks: [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)) },
  time: { title: "Time in steps", metric: "time/step", tell: duration, tick: (x) => (x < 60 ? `${number(x)} s` : x % 3600 === 0 ? `${x / 3600} h` : x % 60 === 0 && x < 3600 ? `${x / 60} min` : duration(x)), ticks: [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000] },
  tokens: { title: "Trained tokens", metric: "parity/tokens", tell: (x) => `${number(x)} tokens`, ticks: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power)) },
};

const sums = new WeakMap(); // a column's values -> Map of step -> their sum up to it

// A function from a run's step to its place on the axis.
function placeOf(run) {
  const { metric } = AXES[state.axis];
  const column = metric && cached(run, metric);
  if (!metric) return (step) => step;
  if (!column) return () => null;
  let places = sums.get(column.values);
  if (!places) {
    places = new Map();
    let sum = 0;
    column.steps.forEach((step, row) => { sum += Number.isFinite(column.values[row]) ? column.values[row] : 0; places.set(step, sum); });
    sums.set(column.values, places);
  }
  return (step) => places.get(step) ?? null;
}

// {steps, xs, ys, raw} of a run's metric, without steps that lack it. Infinity is kept in `raw`, since it is drawn.
function points(run, column, smooth = 0) {
  const steps = [], xs = [], ys = [], raw = [];
  const place = placeOf(run);
  let mean = 0, weight = 0;
  for (let row = 0; row < column.steps.length; row++) {
    const value = column.values[row], x = place(column.steps[row]);
    if (Number.isNaN(value) || x === null || x === xs[xs.length - 1]) continue;
    steps.push(column.steps[row]);
    xs.push(x);
    raw.push(value);
    if (!Number.isFinite(value)) { ys.push(null); continue; }
    mean = smooth * mean + (1 - smooth) * value;
    weight = smooth * weight + (1 - smooth);
    ys.push(mean / weight);
  }
  return { steps, xs, ys, raw };
}

// A metric's name next to the panel's title; for metrics by region, the region.
function labelOf(metric, panel) {
  if (panel.labels?.[metric]) return panel.labels[metric];
  if (panel.metrics.length === 1 && !panel.named) return "";
  const parts = metric.split("/");
  const last = parts[parts.length - 1];
  if (parts.length === 3 && panel.metrics.every((name) => name.startsWith("fleet/") && name.endsWith(`/${last}`))) return parts[1];
  return parts.slice(1).join(": ").replaceAll("_", " ").replace(": sync ", ": ").replace(panel.unit === "s" ? / seconds$/ : "", "");
}

// A panel's series: one for each run and metric with points. A stack shows one run, `panel.run`.
export function seriesOf(panel) {
  const stack = panel.kind === "stack";
  const found = [];
  const own = panel.metrics.filter((metric) => !panel.beneath?.includes(metric));
  for (const run of stack ? [panel.run] : state.chosen) {
    for (const metric of panel.metrics) {
      const column = cached(run, metric);
      if (!column) continue;
      const beneath = !stack && !own.includes(metric);
      const data = points(run, column, stack ? 0 : beneath ? Math.max(BENEATH, state.smooth) : panel.beneath?.length ? 0 : state.smooth); // evaluations are few
      if (!data.xs.length) continue;
      const several = state.chosen.length > 1 && !stack;
      const name = several && panel.beneath?.length && metric === own[0] ? "" : labelOf(metric, panel); // the title says it
      const label = [name, several ? briefName(run) : ""].filter(Boolean).join(" · ");
      const look_ = stack ? look(panel.metrics.indexOf(metric)) : beneath ? { colour: `${lookOf(run).colour}90`, dash: [] } : lookOfSeries(run, metric, own);
      found.push({ run, metric, label, beneath, ...look_, ...data });
    }
  }
  return stack && found.length ? stacked(found, panel) : found;
}

// Stack the lines; the part of a step's time that is in no phase is waiting, at the top.
function stacked(series, panel) {
  const tables = uPlot.join(series.map((line) => [line.xs, line.raw]));
  const xs = tables[0];
  const stepOf = new Map(series.flatMap((line) => line.xs.map((x, index) => [x, line.steps[index]])));
  const steps = Array.from(xs, (x) => stepOf.get(x));
  const total = new Float64Array(xs.length);
  const lines = series.map((line, index) => {
    const raw = Array.from(xs, (_, at) => tables[index + 1][at] ?? 0);
    return { ...line, steps, xs, raw, ys: raw.map((value, at) => (total[at] += value)) };
  });
  const whole = panel.metrics[0].startsWith("time/") && cached(panel.run, "time/step");
  if (whole) {
    const at = new Map(Array.from(whole.steps, (step, row) => [step, whole.values[row]]));
    const raw = steps.map((step, index) => Math.max(0, (at.get(step) || 0) - total[index]));
    lines.push({ run: panel.run, metric: "waiting", label: "waiting", colour: css("--faint"), dash: [], steps, xs, raw, ys: raw.map((value, index) => total[index] + value) });
  }
  return lines;
}

// The vertical scales of charts, and their ticks.

import { number, percent } from "./dom.js";

export function scaleOf(panel) {
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

export function axisOf(panel, room) {
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
        const between = (digits) => {
          const ticks = [];
          for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++) for (const digit of digits) ticks.push(Number(`${digit}e${power}`));
          return ticks.filter((value) => value >= min && value <= max);
        };
        const ticks = [[1], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]].map(between).find((found) => found.length > 1) ?? [min, max];
        const every = Math.ceil(ticks.length / room);
        return ticks.filter((value, index) => value === 1 || index % every === 0);
      },
      values: (_, ticks) => ticks.map((value) => compact(value)),
    };
  }
  if (panel.scale === "fraction") return { values: (_, ticks) => ticks.map((value) => (value < 0 ? "" : percent(value))) };
  return { values: (_, ticks) => ticks.map((value) => (value === null ? "" : compact(value))) };
}

export const compact = (value) => {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  return number(value, 3);
};

// The panel as it is drawn: `other` turns a linear scale into a logarithmic one, and the other way round. Values that are
// 0 or negative get a scale that is linear around 0.
export function scaledAs(panel, other, series) {
  if (!other) return panel;
  if (panel.scale === "log" || panel.scale === "symlog") return { ...panel, scale: "linear", guides: panel.guides.filter((value) => value === 0) };
  const values = series.flatMap((line) => [...line.raw]).filter((value) => Number.isFinite(value));
  const least = values.reduce((least, value) => (value !== 0 && Math.abs(value) < least ? Math.abs(value) : least), Infinity);
  if (values.every((value) => value > 0)) return { ...panel, scale: "log", guides: panel.guides.filter((value) => value > 0) };
  return { ...panel, scale: "symlog", threshold: 10 ** Math.floor(Math.log10(Number.isFinite(least) ? least : 1e-3)) };
}

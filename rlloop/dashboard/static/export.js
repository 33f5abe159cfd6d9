// A chart as a picture of its own: SVG from the numbers that are drawn, PNG from that.

import { h, show, svg } from "./dom.js";
import { css, slug, shortName, state } from "./state.js";

const FONT = "system-ui, sans-serif";
const HEAD = 26, LEGEND = 18, MARGIN = 12; // pixels

// The picture as SVG text; null where nothing is drawn.
export function chartSvg(chart, title) {
  const drawn = chart.plot ? lines(chart) : chart.host.querySelector("svg.histogram");
  if (!drawn) return null;
  const body = chart.plot ? drawn : drawn.cloneNode(true);
  const [width, height] = chart.plot ? [chart.plot.width, chart.plot.height] : [chart.host.clientWidth, chart.height];
  const legend = chart.plot ? entries(chart, width) : [];
  const top = MARGIN + HEAD + LEGEND * (legend.length ? legend[legend.length - 1].row + 1 : 0);
  const whole = [width + 2 * MARGIN, top + height + MARGIN];
  const picture = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width: whole[0], height: whole[1], viewBox: `0 0 ${whole[0]} ${whole[1]}`, "font-family": FONT });
  picture.append(svg("rect", { width: whole[0], height: whole[1], fill: css("--card") }), text(title, MARGIN, MARGIN + 14, { "font-size": 15, "font-weight": 600, fill: css("--ink") }));
  for (const { label, x, row, line } of legend) {
    const y = MARGIN + HEAD + row * LEGEND;
    picture.append(svg("line", { x1: MARGIN + x, x2: MARGIN + x + 20, y1: y + 2, y2: y + 2, stroke: line.colour, "stroke-width": 2.2, "stroke-dasharray": line.dash.join(" ") }),
      text(label, MARGIN + x + 26, y + 6, { "font-size": 11.5, fill: css("--muted") }));
  }
  body.setAttribute("transform", `translate(${MARGIN} ${top})`);
  if (!chart.plot) { body.setAttribute("x", MARGIN); body.setAttribute("y", top); body.setAttribute("width", width); body.setAttribute("height", height); body.removeAttribute("transform"); }
  picture.append(body);
  return new XMLSerializer().serializeToString(picture);
}

function text(content, x, y, attributes) {
  const element = svg("text", { x, y, ...attributes });
  element.textContent = content;
  return element;
}

// The legend's entries, broken into rows.
function entries(chart, width) {
  let x = 0, row = 0;
  return chart.series.map((line) => {
    const last = line.raw[line.raw.length - 1];
    const label = [line.label || (state.chosen.length > 1 ? "" : shortName(line.run)), show(last, chart.panel)].filter(Boolean).join("  ");
    const size = 44 + label.length * 6.4;
    if (x && x + size > width) { x = 0; row += 1; }
    const entry = { label, x, row, line };
    x += size;
    return entry;
  });
}

function lines(chart) {
  const { plot, lines: all, panel, drawnAs } = chart;
  const left = plot.over.offsetLeft, top = plot.over.offsetTop, width = plot.over.clientWidth, height = plot.over.clientHeight;
  const x = (value) => left + plot.valToPos(value, "x"), y = (value) => top + plot.valToPos(value, "y");
  const small = { "font-size": 11, fill: css("--muted") };
  const id = `clip-${slug(panel)}`;
  const clip = svg("clipPath", { id }, svg("rect", { x: left, y: top - 3, width, height: height + 6 }));
  const group = svg("g", {}, clip);
  const [across, up] = plot.axes;
  (up._splits ?? []).forEach((value, index) => {
    if (value === null || value < plot.scales.y.min || value > plot.scales.y.max) return;
    group.append(svg("line", { x1: left, x2: left + width, y1: y(value), y2: y(value), stroke: css("--line") }), text(up._values[index] ?? "", left - 6, y(value) + 4, { ...small, "text-anchor": "end" }));
  });
  (across._splits ?? []).forEach((value, index) => {
    if (value !== null && value >= plot.scales.x.min && value <= plot.scales.x.max) group.append(text(across._values[index] ?? "", x(value), top + height + 17, { ...small, "text-anchor": "middle" }));
  });
  for (const guide of drawnAs.guides) {
    if (guide >= plot.scales.y.min && guide <= plot.scales.y.max) group.append(svg("line", { x1: left, x2: left + width, y1: y(guide), y2: y(guide), stroke: css(guide === 0 ? "--good" : "--warn"), "stroke-dasharray": guide === 0 ? "" : "3 4" }));
  }
  const stack = panel.kind === "stack";
  const drawn = svg("g", { "clip-path": `url(#${id})`, fill: "none" });
  for (const line of all) {
    let path = "", pen = false;
    line.xs.forEach((at, index) => {
      const value = line.ys[index];
      if (value === null || !Number.isFinite(value)) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      pen = true;
    });
    if (stack && path) path += `L${x(line.xs[line.xs.length - 1])},${top + height}L${x(line.xs[0])},${top + height}Z`;
    const [colour, alpha] = [line.colour.slice(0, 7), line.colour.length > 7 ? parseInt(line.colour.slice(7), 16) / 255 : 1];
    drawn.append(svg("path", { d: path, ...(stack ? { fill: colour, "fill-opacity": 0.7 } : { stroke: colour, "stroke-opacity": alpha.toFixed(2), "stroke-width": line.pale ? 1.2 : 1.8, "stroke-dasharray": line.dash.join(" "), "stroke-linejoin": "round" }) }));
  }
  group.append(drawn);
  return group;
}

function save(href, name) {
  const anchor = h("a", { href, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
}

// Save a chart's picture under the names of its runs and panel. `kind`: svg or png, the latter at twice the size.
export async function saveChart(chart, kind) {
  const title = [chart.panel.title, chart.panel.unit].filter(Boolean).join(", ");
  const picture = chartSvg(chart, title);
  if (!picture) return;
  const runs = chart.panel.run ? [chart.panel.run] : state.chosen;
  const name = `${runs.length > 2 ? `${runs.length}-runs` : runs.map((run) => shortName(run).replaceAll(/[^\w=.,+-]+/g, "-")).join("-")}_${slug(chart.panel)}.${kind}`;
  const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture)}`;
  if (kind === "svg") { save(url, name); return; }
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = h("canvas", { width: image.width * 2, height: image.height * 2 });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  save(canvas.toDataURL("image/png"), name);
}

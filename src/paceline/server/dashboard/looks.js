// How series are drawn into a plot, and their samples in a legend.
//
// A plot is {samples, engine, x(time), y(value), left, right, top, bottom, em}, in pixels.

import { svg } from "./dom.js";

const GAP_S = 2.5; // without a sample for longer, a line is broken

// The parts of a series without a gap, as lists of [x, y].
function parts(plot, series) {
  const found = [];
  let part = null;
  let before = null;
  for (const sample of plot.samples) {
    const value = series.of(sample, plot.engine);
    if (value === null || (before !== null && sample.t - before > GAP_S)) part = null;
    before = sample.t;
    if (value === null) continue;
    if (part === null) found.push((part = []));
    part.push([plot.x(sample.t), plot.y(value)]);
  }
  return found;
}

// A point alone is a line of no length, which a round cap makes a dot.
const outline = (part) =>
  part.map(([x, y], i) => `${i ? "L" : "M"}${x} ${y}`).join("") + (part.length > 1 ? "" : "h0");

const path = (look, series, steps) => svg("path", { class: `${look} ${series.tone}`, d: steps });

function line(plot, series) {
  return [path("line", series, parts(plot, series).map(outline).join(""))];
}

function area(plot, series) {
  const filled = parts(plot, series).map((part) => {
    const [first, last] = [part[0], part.at(-1)];
    return `${outline(part)}L${last[0]} ${plot.bottom}L${first[0]} ${plot.bottom}Z`;
  });
  return [path("area", series, filled.join("")), ...line(plot, series)];
}

function dots(plot, series) {
  const points = parts(plot, series).flat();
  return [path("dots", series, points.map(([x, y]) => `M${x} ${y}h0`).join(""))];
}

// A mark at the top of every second that has any.
function events(plot, series) {
  const seen = plot.samples.filter((sample) => series.of(sample, plot.engine) > 0);
  const marks = seen.map(({ t }) => `M${plot.x(t)} ${plot.top}v${plot.em * 0.6}`);
  return [path("events", series, marks.join(""))];
}

// One box a second, from `low` to `high`.
function box(plot, sample, low, high) {
  const right = plot.x(sample.t);
  const left = Math.max(plot.left, plot.x(sample.t - 1));
  return `M${left} ${plot.y(low)}H${right}V${plot.y(high)}H${left}Z`;
}

// The series' value is [low, high].
function band(plot, series) {
  const boxes = plot.samples.map((sample) => {
    const range = series.of(sample, plot.engine);
    return range === null ? "" : box(plot, sample, range[0], range[1]);
  });
  return [path("area", series, boxes.join(""))];
}

// Shares stand on the shares of the series before them: `from(sample)` gives where.
function stack(plot, series) {
  const boxes = plot.samples.map((sample) => {
    const share = series.of(sample, plot.engine);
    if (!share) return "";
    const low = series.from(sample);
    return box(plot, sample, low, low + share);
  });
  return [path("full", series, boxes.join(""))];
}

// Each gives the elements of a series; "none" is for values that are only read out.
export const LOOKS = { line, area, dots, events, band, stack, none: () => [] };

const SWATCHES = {
  line: ["line", "M0 5H16"],
  area: ["line", "M0 5H16"],
  dots: ["dots", "M8 5h0"],
  events: ["events", "M8 1v8"],
  band: ["area", "M0 0H16V10H0Z"],
  stack: ["full", "M1 0H15V10H1Z"],
};

// What stands for a series in a legend; nothing for one that is not drawn.
export function swatch(series) {
  if (!(series.look in SWATCHES)) return [];
  const [look, steps] = SWATCHES[series.look];
  const made = svg("svg", { class: "swatch", viewBox: "0 0 16 10", "aria-hidden": "true" });
  made.append(path(look, series, steps));
  return [made];
}

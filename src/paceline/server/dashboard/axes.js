// The measures that all charts have in common, and the lines and words of their axes.

import { svg } from "./dom.js";
import { plain, ticks } from "./format.js";

const TICK_S = { 60: 15, 300: 60, 600: 120 }; // between marks of the time axis, by what is shown

// Of a chart's place: its width and the size of its letters in pixels, and how high plots are.
export function measure(place) {
  const width = place.clientWidth;
  const em = parseFloat(getComputedStyle(place).fontSize);
  return { width, em, tall: Math.max(9 * em, Math.min(0.3 * width, 18 * em)) };
}

// Borders of a plot. hasFoot: room for words below.
export function borders({ width, em }, tall, hasFoot) {
  const top = 0.7 * em;
  const bottom = top + tall;
  const height = bottom + (hasFoot ? 1.8 : 0.5) * em;
  return { em, left: 4.6 * em, right: width - 0.6 * em, top, bottom, height };
}

export function resize(element, width, height) {
  element.setAttribute("viewBox", `0 0 ${width} ${height}`);
  element.setAttribute("height", height);
}

// Words below a plot.
export function foot(plot, x, words, anchor = "middle") {
  return svg("text", { x, y: plot.bottom + 1.4 * plot.em, "text-anchor": anchor }, words);
}

function across(plot, y, look) {
  return svg("line", { class: look, x1: plot.left, x2: plot.right, y1: y, y2: y });
}

// A line across at each value, and its words at the left. say: words of a value.
export function valueAxis(plot, values, say) {
  return values.flatMap((value) => {
    const y = plot.y(value);
    const at = { x: plot.left - 0.5 * plot.em, y: y + 0.35 * plot.em, "text-anchor": "end" };
    return [across(plot, y, value ? "grid" : "base"), svg("text", at, plain(say(value)))];
  });
}

// As many round values as the height has room for.
export function roundValues(plot, whole) {
  const room = Math.floor((plot.bottom - plot.top) / (2 * plot.em));
  return ticks(plot.end, Math.max(1, room), whole);
}

// A dashed line at a limit.
export const limit = (plot, value) => across(plot, plot.y(value), "mark");

// hasWords: whether the times are named too.
export function timeAxis(plot, hasWords) {
  const made = [];
  for (let ago = plot.span; ago >= 0; ago -= TICK_S[plot.span]) {
    const x = plot.x(plot.now - ago);
    made.push(svg("line", { class: "grid", x1: x, x2: x, y1: plot.top, y2: plot.bottom }));
    if (!hasWords) continue;
    const words = plot.span > 60 ? `−${ago / 60} min` : `−${ago} s`;
    made.push(ago ? foot(plot, x, words) : foot(plot, x, "now", "end"));
  }
  return made;
}

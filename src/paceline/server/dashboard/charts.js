// Line and bar charts as SVG, with a read-out of the point under the pointer, or of the latest.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 150, LEFT = 44, BOTTOM = 18, TOP = 6;

export function element(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1e6) return (value / 1e6).toFixed(1) + "M";
  if (Math.abs(value) >= 1e4) return (value / 1e3).toFixed(0) + "k";
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return value.toFixed(0);
  return value.toFixed(Math.abs(value) >= 10 ? 1 : 2);
}

// The least of 1, 2, 5 times a power of ten that is not below.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((end) => end >= value * 0.9999);
}

// As wide as its place, so that text keeps its shape.
const widthOf = (place) => Math.max(place.clientWidth, 240);

function frame(width, top, label) {
  const svg = element("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP);
    svg.append(element("line", { class: "grid", x1: LEFT, x2: width, y1: y, y2: y }));
    svg.append(element("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(top * share)));
  }
  return svg;
}

function legend(series, values, title) {
  const line = document.createElement("div");
  line.className = "legend";
  series.forEach(({ name }, i) => {
    const item = document.createElement("span");
    const value = document.createElement("b");
    item.className = `key${i}`;
    value.textContent = short(values[i]);
    item.append(`${name} `, value);
    line.append(item);
  });
  const when = document.createElement("span");
  when.textContent = title;
  line.append(when);
  return line;
}

export function empty(place, words) {
  const line = document.createElement("p");
  line.className = "empty";
  line.textContent = words;
  place.replaceChildren(line);
}

// times: unix seconds, ascending. series: [{name, values}], null where nothing is known.
// mark: a value with a line of its own. top: the axis' end, else the largest value rounded up.
export function lines(place, times, series, { mark = null, top = null } = {}) {
  const known = series.flatMap(({ values }) => values).filter((value) => value !== null);
  if (!known.length) return empty(place, "nothing yet");
  const end = top ?? roundUp(Math.max(...known, mark ?? 0, 1e-9));
  const width = widthOf(place), last = times.length - 1, span = Math.max(times[last] - times[0], 1);
  const x = (i) => LEFT + (width - LEFT) * (times[i] - times[0]) / span;
  const y = (value) => HEIGHT - BOTTOM - Math.min(value / end, 1) * (HEIGHT - BOTTOM - TOP);
  const words = series.map(({ name, values }) => `${name} ${short(values[last])}`).join(", ");
  const svg = frame(width, end, words);
  if (mark !== null) svg.append(element("line", { class: "mark", x1: LEFT, x2: width, y1: y(mark), y2: y(mark) }));
  series.forEach(({ values }, n) => {
    let path = "";
    values.forEach((value, i) => {
      if (value !== null) path += `${i && values[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    svg.append(element("path", { class: `line s${n}`, d: path }));
  });
  svg.append(element("text", { x: LEFT, y: HEIGHT - 4 }, `${Math.round(span)} s ago`));
  svg.append(element("text", { x: width, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  const show = (i, title) => legend(series, series.map(({ values }) => values[i]), title);
  let line = show(last, "");
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = times[0] + span * ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT);
    const i = times.reduce((best, time, j) => (Math.abs(time - at) < Math.abs(times[best] - at) ? j : best), 0);
    const shown = show(i, new Date(times[i] * 1000).toLocaleTimeString());
    line.replaceWith(shown);
    line = shown;
  });
  place.replaceChildren(svg, line);
}

// values: [{name, share, title}], shares from 0 to 1.
export function bars(place, values, label) {
  const width = widthOf(place), svg = frame(width, 1, label);
  const step = (width - LEFT) / values.length;
  values.forEach(({ name, share, title }, i) => {
    const height = share * (HEIGHT - BOTTOM - TOP), at = LEFT + i * step;
    const bar = element("rect", { class: "bar", x: at + step * 0.15, width: step * 0.7, y: HEIGHT - BOTTOM - height, height });
    bar.append(element("title", {}, title));
    svg.append(bar, element("text", { x: at + step / 2, y: HEIGHT - 4, "text-anchor": "middle" }, name));
    svg.append(element("text", { x: at + step / 2, y: HEIGHT - BOTTOM - height - 3 > 12 ? HEIGHT - BOTTOM - height - 3 : 14, "text-anchor": "middle" }, share.toFixed(2)));
  });
  place.replaceChildren(svg);
}

// Bars for acceptance by draft position, each with its share, and the counts under the pointer.

import { borders, foot, measure, resize, valueAxis } from "./axes.js";
import { html, svg, write } from "./dom.js";
import { count, percent } from "./format.js";

const SHARES = [0, 0.25, 0.5, 0.75, 1]; // named at the axis

const share = ({ proposed, accepted }) => (proposed ? accepted / proposed : 0);

function sentence(one) {
  const counts = `${count(one.accepted)} of ${count(one.proposed)} accepted`;
  return `position ${one.position}: ${counts}, ${percent(share(one))}`;
}

function summary(positions) {
  const sum = (name) => positions.reduce((total, one) => total + one[name], 0);
  if (!sum("proposed")) return "nothing drafted yet";
  return `${count(sum("accepted"))} of ${count(sum("proposed"))} drafts accepted`;
}

export class Bars {
  #place;
  #readout = html("div", "legend");
  #svg = svg("svg", { role: "img" });
  #positions = [];
  #plot = null;
  #pointed = null; // index of the bar under the pointer

  constructor(place) {
    this.#place = place;
    place.replaceChildren(this.#readout, this.#svg);
    for (const name of ["pointerdown", "pointermove", "pointerleave"]) {
      this.#svg.addEventListener(name, (event) => this.#point(event));
    }
  }

  // positions: [{position, proposed, accepted}], ascending.
  draw(positions) {
    const size = measure(this.#place);
    if (!size.width) return; // hidden
    this.#positions = positions;
    this.#plot = this.#layOut(size);
    const { left, em, height } = this.#plot;
    resize(this.#svg, size.width, height);
    this.#svg.setAttribute(
      "aria-label",
      positions.map(sentence).join("; ") || "nothing drafted yet",
    );
    this.#svg.replaceChildren(
      ...valueAxis(this.#plot, SHARES, percent),
      ...positions.flatMap((one, i) => this.#bar(one, i)),
      foot(this.#plot, left - 0.5 * em, "position", "end"),
    );
    this.#show();
  }

  #layOut(size) {
    const box = borders(size, size.tall, true);
    const step = (box.right - box.left) / Math.max(this.#positions.length, 1);
    return { ...box, step, y: (value) => box.bottom - (box.bottom - box.top) * value };
  }

  #bar(one, i) {
    const { left, top, bottom, step, em, y } = this.#plot;
    const upper = y(share(one));
    const middle = left + (i + 0.5) * step;
    const width = Math.min(step * 0.7, 4 * em);
    const box = { x: middle - width / 2, width, y: upper, height: bottom - upper };
    const made = [svg("rect", { class: "full t0", ...box })];
    const every = Math.ceil((1.7 * em) / step); // as many numbers as there is room for
    if (i % every === 0) made.push(foot(this.#plot, middle, one.position));
    if (step < 3 * em) return made;
    const isInside = upper - top < 1.4 * em; // no room above the bar
    const look = isInside ? "inside" : "value";
    const at = { x: middle, y: upper + (isInside ? 1.2 : -0.4) * em, "text-anchor": "middle" };
    return [...made, svg("text", { class: look, ...at }, percent(share(one)))];
  }

  #point(event) {
    if (this.#plot === null) return;
    const x = event.clientX - this.#svg.getBoundingClientRect().left;
    const i = Math.floor((x - this.#plot.left) / this.#plot.step);
    this.#pointed = event.type === "pointerleave" ? null : i;
    this.#show();
  }

  #show() {
    const one = this.#positions[this.#pointed];
    write(this.#readout, one ? sentence(one) : summary(this.#positions));
  }
}

// Charts over time: strips above one another with one time axis, and a cursor that all share.
//
// A strip is described by {series, tick, weight, end, least, ticks, whole, mark, empty}:
//   series(view)   what is drawn: [{name, look, tone, of, say}]. `of(sample, engine)` is a value or
//                  null, `say(value)` its words, `look` one of LOOKS, `tone` a class of style.css
//   tick(value)    the words at the axis
//   weight         its share of the height, 1 if not given
//   end, least     end of the axis; or what the end is at least, where the data says
//   ticks, whole   values to name at the axis; or only whole numbers
//   mark(engine)   a limit that has a line of its own
//   empty          what to say where no sample has a value

import { borders, foot, limit, measure, resize, roundValues, timeAxis, valueAxis } from "./axes.js";
import { html, svg, write } from "./dom.js";
import { clock, nearest } from "./format.js";
import { LOOKS, swatch } from "./looks.js";

const HEADROOM = 1.06; // the axis ends a little above the largest value

// The moment that the reader points at; null for the latest. All charts follow it.
export class Cursor {
  time = null;
  #watchers = [];

  watch(watcher) {
    this.#watchers.push(watcher);
  }

  move(time) {
    if (time === this.time) return;
    this.time = time;
    for (const watcher of this.#watchers) watcher();
  }
}

class Strip {
  svg = svg("svg", { "aria-hidden": "true" }); // the chart says it in words
  legend = html("div", "legend");
  #spec;
  #isLast;
  #series = [];
  #values = new Map(); // the element of each series' value
  #plot = null;
  #cursor = svg("g", { class: "cursor" });

  constructor(spec, isLast) {
    this.#spec = spec;
    this.#isLast = isLast;
  }

  // view: {samples, now, span, engine}. size: of `measure`. tall: height of the plot in pixels.
  draw(view, size, tall) {
    this.#series = this.#spec.series(view);
    this.#plot = this.#layOut(view, size, tall);
    const { engine } = view;
    const drawn = this.#series.filter(({ look }) => look !== "none");
    const isKnown = view.samples.some((sample) =>
      drawn.some(({ of }) => of(sample, engine) !== null),
    );
    resize(this.svg, size.width, this.#plot.height);
    this.svg.replaceChildren(
      ...this.#axes(),
      ...drawn.flatMap((one) => LOOKS[one.look](this.#plot, one)),
      ...(isKnown ? [] : [this.#apology()]),
      this.#cursor,
    );
    this.#layLegend();
  }

  #layOut(view, size, tall) {
    const box = borders(size, tall, this.#isLast);
    const { left, right, top, bottom } = box;
    const { now, span } = view;
    const mark = this.#spec.mark?.(view.engine) ?? null;
    const end = this.#spec.end ?? this.#end(view, mark);
    const round = (value) => Math.round(value * 10) / 10;
    return {
      ...view,
      ...box,
      mark,
      end,
      x: (time) => round(right - ((right - left) * (now - time)) / span),
      y: (value) => round(bottom - (bottom - top) * Math.min(value / end, 1)),
      time: (x) => now - (span * (right - x)) / (right - left),
    };
  }

  #end({ samples, engine }, mark) {
    const values = this.#series
      .filter(({ look }) => look !== "none")
      .flatMap(({ of }) => samples.map((sample) => of(sample, engine)))
      .flat()
      .filter(Number.isFinite);
    return HEADROOM * Math.max(this.#spec.least ?? 1e-9, mark ?? 0, ...values);
  }

  #axes() {
    const plot = this.#plot;
    const { ticks, whole, tick } = this.#spec;
    return [
      ...timeAxis(plot, this.#isLast),
      ...valueAxis(plot, ticks ?? roundValues(plot, whole), tick),
      ...(plot.mark === null ? [] : [limit(plot, plot.mark)]),
    ];
  }

  // Why nothing is drawn.
  #apology() {
    const { samples, left, right, top, bottom, em } = this.#plot;
    const words = samples.length ? (this.#spec.empty ?? "nothing yet") : "no data yet";
    const at = { x: (left + right) / 2, y: (top + bottom) / 2 + 0.35 * em };
    return svg("text", { class: "apology", "text-anchor": "middle", ...at }, words);
  }

  #layLegend() {
    const names = this.#series.map(({ name }) => name);
    if (names.join("\n") === [...this.#values.keys()].join("\n")) return;
    this.#values.clear();
    const items = this.#series.map((one) => {
      const item = html("span", "item");
      const value = html("b");
      item.append(...swatch(one), html("span", "", one.name), value);
      this.#values.set(one.name, value);
      return item;
    });
    this.legend.replaceChildren(...items);
  }

  // Show a sample's values beside the names, and the cursor if there is one; the values as words.
  show(sample, hasCursor) {
    this.#cursor.replaceChildren(...(hasCursor && sample !== null ? this.#pointer(sample.t) : []));
    return this.#series.map(({ name, of, say }) => {
      const words = say(sample === null ? null : of(sample, this.#plot.engine));
      write(this.#values.get(name), words);
      return `${name} ${words}`;
    });
  }

  #pointer(time) {
    const plot = this.#plot;
    const x = plot.x(time);
    const line = svg("line", { x1: x, x2: x, y1: plot.top, y2: plot.bottom });
    if (!this.#isLast) return [line];
    // In place of the axis' words, and within their row.
    const { left, right, bottom, em } = plot;
    const row = { x: left - 2.5 * em, width: right - left + 3 * em };
    const ground = svg("rect", { ...row, y: bottom + 0.55 * em, height: 1.2 * em });
    const middle = Math.min(Math.max(x, left), right - 2 * em);
    return [line, ground, foot(plot, middle, clock(time))];
  }

  // The time under a pointer.
  timeAt(event) {
    return this.#plot.time(event.clientX - this.svg.getBoundingClientRect().left);
  }
}

export class Chart {
  #place;
  #strips;
  #weights; // shares of the height
  #cursor;
  #view = null;

  constructor(place, specs, cursor) {
    const weights = specs.map(({ weight }) => weight ?? 1);
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    this.#place = place;
    this.#cursor = cursor;
    this.#weights = weights.map((weight) => weight / total);
    this.#strips = specs.map((spec, i) => new Strip(spec, i === specs.length - 1));
    place.replaceChildren(...this.#strips.flatMap(({ legend, svg }) => [legend, svg]));
    this.#listen();
    cursor.watch(() => this.#show(true));
  }

  // To whoever cannot see it, a chart is a slider along time that reads out its values.
  #listen() {
    const place = this.#place;
    place.tabIndex = 0;
    place.setAttribute("role", "slider");
    place.addEventListener("keydown", (event) => this.#key(event));
    place.addEventListener("blur", () => this.#cursor.move(null));
    for (const strip of this.#strips) {
      const follow = (event) => this.#point(strip, event);
      strip.svg.addEventListener("pointerdown", follow);
      strip.svg.addEventListener("pointermove", follow);
      strip.svg.addEventListener("pointerleave", ({ pointerType }) => {
        if (pointerType === "mouse") this.#cursor.move(null);
      });
    }
  }

  draw(view) {
    const size = measure(this.#place);
    if (!size.width) return; // hidden
    this.#view = view;
    const room = size.tall - (this.#strips.length - 1) * 2.6 * size.em; // less legends between
    this.#strips.forEach((strip, i) => strip.draw(view, size, room * this.#weights[i]));
    this.#show(this.#place !== document.activeElement);
  }

  // speak: tell a screen reader; not every second while it reads this very chart.
  #show(speak) {
    if (this.#view === null) return;
    const { samples, now, span } = this.#view;
    const { time } = this.#cursor;
    const sample = time === null ? (samples.at(-1) ?? null) : nearest(samples, time);
    const words = this.#strips.flatMap((strip) => strip.show(sample, time !== null));
    if (!speak) return;
    const when = sample === null ? "no data yet" : time === null ? "now" : clock(sample.t);
    const ago = sample === null ? 0 : Math.min(0, Math.round(sample.t - now));
    this.#place.setAttribute("aria-valuemin", -span);
    this.#place.setAttribute("aria-valuemax", 0);
    this.#place.setAttribute("aria-valuenow", ago);
    this.#place.setAttribute("aria-valuetext", [when, ...words].join(", "));
  }

  #point(strip, event) {
    if (this.#view === null) return;
    const sample = nearest(this.#view.samples, strip.timeAt(event));
    this.#cursor.move(sample === null ? null : sample.t);
  }

  #key(event) {
    const samples = this.#view?.samples ?? [];
    const { time } = this.#cursor;
    const last = samples.length - 1;
    const i = time === null ? last : samples.indexOf(nearest(samples, time));
    const moves = { ArrowLeft: i - 1, ArrowDown: i - 1, ArrowRight: i + 1, ArrowUp: i + 1 };
    const jumps = { PageDown: i - 10, PageUp: i + 10, Home: 0, End: last };
    const to = { ...moves, ...jumps }[event.key];
    if (event.key === "Escape") this.#cursor.move(null);
    else if (to === undefined || last < 0) return;
    else this.#cursor.move(samples[Math.min(Math.max(to, 0), last)].t);
    event.preventDefault();
  }
}

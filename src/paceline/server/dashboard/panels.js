// What the panels show: the series of each chart, and where their values are in a sample.

import { Bars } from "./bars.js";
import { Chart } from "./charts.js";
import { at, write } from "./dom.js";
import { count, draftLengths, latency, NONE, percent, share, short } from "./format.js";

// Known reasons for a draft length keep their colour and place; others share the last colour.
const REASONS = [
  "fixed",
  "disabled by batch size",
  "token budget",
  "free blocks",
  "end of sequence",
  "drafter context",
  "catch-up",
  "no drafter",
];

const perSecond = (value) => (value === null ? NONE : `${short(value)}/s`);
const rangeWords = (range) => (range === null ? NONE : range.join(" to "));
const latencyTick = (seconds) => (seconds ? latency(seconds) : "0");

// of: the name of a sample's field, or a function of a sample and the engine.
function series(name, look, tone, say, of) {
  const read = typeof of === "string" ? (sample) => sample[of] ?? null : of;
  return { name, look, tone, say, of: read };
}

const strip = (settings, ...all) => ({ series: () => all, tick: short, ...settings });

function percentiles(field) {
  const one = (i) => (sample) => sample[field]?.[i] ?? null;
  return [
    strip(
      { least: 0.001, tick: latencyTick, empty: "none in the last minute" },
      series("p50", "line", "p0", latency, one(0)),
      series("p90", "line", "p1", latency, one(1)),
      series("p99", "line", "p2", latency, one(2)),
    ),
  ];
}

// From top to bottom, the strips of each chart.
const CHARTS = {
  throughput: [
    strip({ least: 1 }, series("generated", "area", "t0", short, "generation_tokens")),
    strip({ least: 1, weight: 0.6 }, series("prompt", "area", "t1", short, "prompt_tokens")),
  ],
  batched: [
    strip(
      { mark: ({ max_num_batched_tokens }) => max_num_batched_tokens },
      series("computed", "area", "t0", short, "batched_tokens"),
      series("of the budget", "none", "", percent, budgetUse),
      series("steps", "none", "", perSecond, "steps"),
    ),
  ],
  sequences: [
    strip(
      { mark: ({ max_num_seqs }) => max_num_seqs, whole: true },
      series("running", "area", "t0", count, "running"),
    ),
    strip(
      { least: 4, whole: true, weight: 0.6 },
      series("waiting", "area", "t1", count, "waiting"),
    ),
  ],
  ttft: percentiles("ttft"),
  itl: percentiles("itl"),
  queue: percentiles("queue"),
  kv: [
    strip(
      { end: 1, ticks: [0, 0.25, 0.5, 0.75, 1], tick: percent },
      series("in use", "area", "t0", percent, "kv_use"),
      series("prefix hits", "dots", "t1", percent, "prefix_hit_rate"),
      series("preemptions", "events", "t2", count, "preemptions"),
    ),
  ],
  k: [
    strip(
      { mark: ({ num_speculative_tokens }) => num_speculative_tokens, whole: true },
      series("least to largest", "band", "t0", rangeWords, kRange),
      series("mean k", "line", "t0", short, ({ k }) => draftLengths(k)?.mean ?? null),
    ),
    { series: reasonSeries, tick: percent, end: 1, ticks: [0, 1], weight: 0.7 },
  ],
};

function budgetUse(sample, engine) {
  return sample.batched_tokens / engine.max_num_batched_tokens;
}

function kRange(sample) {
  const lengths = draftLengths(sample.k);
  return lengths === null ? null : [lengths.least, lengths.largest];
}

// The reasons seen in the time shown, known ones first, each standing on the ones before.
function reasonSeries({ samples }) {
  const seen = new Set(samples.flatMap(({ reasons }) => Object.keys(reasons)));
  const others = [...seen].filter((name) => !REASONS.includes(name)).sort();
  const names = [...REASONS.filter((name) => seen.has(name)), ...others];
  return names.map((name, i) => ({
    name,
    look: "stack",
    say: percent,
    tone: `r${REASONS.includes(name) ? REASONS.indexOf(name) : REASONS.length}`,
    of: ({ reasons }) => share(reasons, [name]),
    from: ({ reasons }) => share(reasons, names.slice(0, i)),
  }));
}

// Accepted and drafted tokens of the last minute, as a sentence.
function lastMinute(samples) {
  const minute = samples.slice(-60);
  const [drafted, accepted] = ["drafted", "accepted"].map((name) =>
    minute.reduce((sum, sample) => sum + sample[name], 0),
  );
  if (!drafted) return "nothing drafted in the last minute";
  const rate = short(drafted / minute.length);
  return `last minute: ${percent(accepted / drafted)} of ${rate} drafted tokens/s accepted`;
}

// All panels but the table of requests.
export class Panels {
  #charts;
  #bars;

  constructor(cursor) {
    this.#charts = Object.entries(CHARTS).map(([id, strips]) => new Chart(at(id), strips, cursor));
    this.#bars = new Bars(at("positions"));
  }

  // data: the server's document. span: how many seconds are shown.
  draw({ samples, engine, now, positions }, span) {
    const hasDrafter = Boolean(engine.drafter);
    for (const id of ["positions", "k"]) at(id).hidden = !hasDrafter;
    for (const id of ["no-positions", "no-k"]) at(id).hidden = hasDrafter;
    write(at("minute"), hasDrafter ? lastMinute(samples) : "");
    const { max_num_batched_tokens: budget, max_num_seqs: rows } = engine;
    write(at("budget"), budget ? `budget ${count(budget)}` : "");
    write(at("rows"), rows ? `at most ${count(rows)} run` : "");
    const shown = samples.filter(({ t }) => t > now - span);
    for (const chart of this.#charts) chart.draw({ samples: shown, now, span, engine });
    if (hasDrafter) this.#bars.draw(positions);
  }
}

// Polls the server once a second and draws what it says.

import { bars, empty, lines, short } from "./charts.js";

const SHOWN_SECONDS = 300;
const at = (id) => document.getElementById(id);
let lastHeard = null;
let shown = null; // the latest document

function say(words, bad) {
  at("state").textContent = words;
  at("state").className = bad ? "bad" : "";
}

function duration(seconds) {
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function describe(engine) {
  const drafter = engine.drafter === null ? "no drafter" : `drafter ${engine.drafter}, k up to ${engine.num_speculative_tokens}`;
  return `${engine.model}, ${drafter}, ${engine.dtype} on ${engine.device}, ${engine.num_blocks} KV blocks of ${engine.block_size}`;
}

const milliseconds = (values, i) => (values === null ? null : values[i] * 1000);

function percentiles(samples, name) {
  return ["p50", "p90", "p99"].map((label, i) => ({ name: label, values: samples.map((sample) => milliseconds(sample[name], i)) }));
}

function meanK(sample) {
  const passes = Object.entries(sample.k);
  const count = passes.reduce((sum, [, n]) => sum + n, 0);
  return count ? passes.reduce((sum, [k, n]) => sum + Number(k) * n, 0) / count : null;
}

function drawSamples({ samples, engine, now }) {
  const recent = samples.filter((sample) => sample.t > now - SHOWN_SECONDS);
  const times = recent.map((sample) => sample.t);
  const of = (name, field) => ({ name, values: recent.map((sample) => sample[field]) });
  at("budget").textContent = `budget ${engine.max_num_batched_tokens}`;
  lines(at("throughput"), times, [of("generated", "generation_tokens"), of("prompt", "prompt_tokens")]);
  lines(at("batched"), times, [of("batched", "batched_tokens")], { mark: engine.max_num_batched_tokens });
  lines(at("sequences"), times, [of("running", "running"), of("waiting", "waiting")], { mark: engine.max_num_seqs });
  lines(at("kv"), times, [of("in use", "kv_use")], { top: 1 });
  lines(at("ttft"), times, percentiles(recent, "ttft"));
  lines(at("itl"), times, percentiles(recent, "itl"));
  if (engine.drafter !== null) lines(at("k"), times, [{ name: "k", values: recent.map(meanK) }]);
  drawReasons(recent, engine);
}

function drawReasons(samples, engine) {
  const counts = {};
  for (const sample of samples.slice(-60)) {
    for (const [why, n] of Object.entries(sample.reasons)) counts[why] = (counts[why] ?? 0) + n;
  }
  const total = Object.values(counts).reduce((sum, n) => sum + n, 0);
  const parts = Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([why, n]) => `${why} ${(100 * n / total).toFixed(0)}%`);
  at("reasons").textContent = engine.drafter !== null && total ? `last minute: ${parts.join(", ")}` : "";
}

function drawPositions({ positions, engine }) {
  if (engine.drafter === null) {
    empty(at("positions"), "no drafter");
    empty(at("k"), "no drafter");
  } else if (!positions.length) {
    empty(at("positions"), "nothing drafted yet");
  } else {
    const values = positions.map(({ position, proposed, accepted }) => ({
      name: String(position), share: proposed ? accepted / proposed : 0, title: `${accepted} of ${proposed}`,
    }));
    bars(at("positions"), values, values.map(({ name, share }) => `position ${name}: ${share.toFixed(2)}`).join(", "));
  }
}

function cell(row, text, kind = "") {
  const made = row.insertCell();
  made.textContent = text;
  made.className = kind;
}

function drawRequests({ requests }) {
  const body = document.createElement("tbody");
  body.id = "requests";
  for (const one of requests) {
    const row = body.insertRow();
    const ms = (seconds) => (seconds === null ? "–" : short(seconds * 1000));
    cell(row, new Date(one.finished * 1000).toLocaleTimeString());
    cell(row, one.id);
    cell(row, one.kind);
    cell(row, one.status, one.status);
    for (const value of [one.prompt_tokens, one.cached_tokens, one.output_tokens]) cell(row, String(value));
    cell(row, ms(one.queue_s));
    cell(row, ms(one.ttft_s));
    for (const value of [one.total_s, one.tokens_per_s, one.acceptance, one.mean_k]) cell(row, short(value));
  }
  at("requests").replaceWith(body);
  at("none").hidden = requests.length > 0;
}

function draw(data) {
  shown = data;
  document.title = `Paceline: ${data.engine.model}`;
  at("engine").textContent = describe(data.engine);
  const idle = data.samples.length > 0 && data.samples.at(-1).running + data.samples.at(-1).waiting === 0;
  const words = data.status === "ok" ? (idle ? "idle" : "serving") : `engine: ${data.status}`;
  say(`${words}, up ${duration(data.uptime_s)}`, data.status !== "ok");
  if (data.samples.length) drawSamples(data);
  drawPositions(data);
  drawRequests(data);
}

async function poll() {
  const key = sessionStorage.getItem("key");
  try {
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    const answer = await fetch("data", { headers, cache: "no-store" });
    at("login").hidden = answer.status !== 401;
    if (answer.status === 401) say(key === null ? "a key is needed" : "this key is not accepted", true);
    else if (!answer.ok) say(`the server answers ${answer.status}`, true);
    else {
      draw(await answer.json());
      lastHeard = Date.now();
    }
  } catch (error) {
    const since = lastHeard === null ? "" : `, last heard ${duration((Date.now() - lastHeard) / 1000)} ago`;
    say(`connection lost${since}`, true);
    if (!(error instanceof TypeError) || shown === null) console.warn(error);
  }
  setTimeout(poll, document.hidden ? 5000 : 1000);
}

at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
});
at("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
poll();

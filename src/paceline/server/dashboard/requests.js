// The table of the requests that ended last.

import { at, html } from "./dom.js";
import { clock, count, latency, percent, short } from "./format.js";

const TROUBLE = ["abort", "error"];

const COLUMNS = [
  { name: "ended", look: "text", of: ({ finished }) => clock(finished) },
  { name: "end", look: "text", of: ({ status }) => status },
  { name: "kind", look: "text", of: ({ kind }) => kind },
  { name: "prompt", unit: "tokens", of: ({ prompt_tokens }) => count(prompt_tokens) },
  { name: "cached", unit: "tokens", of: ({ cached_tokens }) => count(cached_tokens) },
  { name: "output", unit: "tokens", of: ({ output_tokens }) => count(output_tokens) },
  { name: "queue", of: ({ queue_s }) => latency(queue_s) },
  { name: "first token", of: ({ ttft_s }) => latency(ttft_s) },
  { name: "total", of: ({ total_s }) => latency(total_s) },
  { name: "decode", unit: "tokens/s", of: ({ tokens_per_s }) => short(tokens_per_s) },
  { name: "accepted", of: ({ acceptance }) => percent(acceptance) },
  { name: "mean k", of: ({ mean_k }) => short(mean_k) },
  { name: "request", look: "text", of: ({ id }) => id },
];

function header() {
  const row = html("tr");
  for (const { name, unit, look } of COLUMNS) {
    const cell = html("th", look, name);
    cell.scope = "col";
    if (unit) cell.append(" ", html("small", "", unit));
    row.append(cell);
  }
  return row;
}

function line(request) {
  const row = html("tr", TROUBLE.includes(request.status) ? "trouble" : "");
  for (const { of, look } of COLUMNS) row.append(html("td", look, of(request)));
  return row;
}

export class Requests {
  #shown = null;

  constructor() {
    at("columns").replaceChildren(header());
  }

  // requests: the newest first. Rebuilt only if they changed, so that a selection stays.
  draw(requests) {
    const now = requests.map(({ id, finished }) => `${id} ${finished}`).join("\n");
    if (now === this.#shown) return;
    this.#shown = now;
    at("requests").replaceChildren(...requests.map(line));
    at("none").hidden = requests.length > 0;
    at("table").hidden = requests.length === 0;
  }
}

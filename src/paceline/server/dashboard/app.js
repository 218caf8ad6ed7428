// The dashboard: asks the server once a second how it is doing, and shows what it says.

import { Cursor } from "./charts.js";
import { at, html, storage, write } from "./dom.js";
import { age, clock, count } from "./format.js";
import { Panels } from "./panels.js";
import { Requests } from "./requests.js";

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 10_000; // while nobody looks
const TIMEOUT_MS = 5000;

// What each status of the server means for who reads the page.
const NOTICES = {
  hanging: "The engine gives no sign of life: a very long step, or it hangs. /health answers 503.",
  dead: "The engine has died. Requests are answered with 503. The server's log has the cause.",
  starting: "The engine is starting. Requests are answered with 503 until it is ready.",
  stopped: "The engine has been stopped. Requests are answered with 503.",
  "shutting down": "The server is shutting down: running requests finish, new ones are refused.",
};

const kept = storage(() => localStorage); // how the page looks
const session = storage(() => sessionStorage); // the key

// ---- header -------------------------------------------------------------------------------------

function facts(engine) {
  const known = (value) => value !== null && value !== undefined;
  const tokens = (value) => `${count(value)} tokens`;
  const drafts = [engine.drafter, engine.spec_policy, `k up to ${engine.num_speculative_tokens}`];
  const blocks = `${count(engine.num_blocks)} blocks of ${tokens(engine.block_size)}`;
  return [
    ["model", engine.model],
    ["drafter", engine.drafter ? drafts.filter(Boolean).join(", ") : "none"],
    ["device", [engine.device, engine.dtype].filter(known).join(", ")],
    ["context", known(engine.max_model_len) && tokens(engine.max_model_len)],
    ["KV cache", known(engine.num_blocks) && blocks],
    ["version", engine.version],
  ].filter(([, value]) => value);
}

function describe(engine) {
  const words = facts(engine);
  const now = JSON.stringify(words);
  if (at("engine").dataset.shown === now) return;
  at("engine").dataset.shown = now;
  const items = words.map(([name, value]) => {
    const item = html("div");
    item.append(html("dt", "", name), html("dd", "", value));
    return item;
  });
  at("engine").replaceChildren(...items);
  document.title = `${engine.model ?? "no model"} · Paceline`;
}

// kind: "good", "bad" or "" (neither); notice: what to know about it, if anything.
function state(words, kind, notice = "") {
  write(at("state"), words);
  at("state").className = kind;
  write(at("notice"), notice);
  at("notice").hidden = notice === "";
}

function showStatus({ status, alive, samples }) {
  const last = samples.at(-1);
  if (status !== "ok") return state(`engine ${status}`, alive ? "" : "bad", NOTICES[status] ?? "");
  if (last === undefined) return state("no data yet", "");
  if (last.running + last.waiting === 0) return state("idle", "good");
  return state("serving", "good");
}

// ---- polling ------------------------------------------------------------------------------------

class Page {
  #panels = new Panels(new Cursor());
  #requests = new Requests();
  #latest = null; // the latest document
  #heard = 0; // when it came, by this machine's clock, ms
  #timer = null;

  constructor() {
    this.span = Number(at("span").value);
  }

  draw() {
    const data = this.#latest;
    if (data === null) return;
    describe(data.engine);
    write(at("uptime"), `up ${age(data.uptime_s)}`);
    this.#panels.draw(data, this.span);
    this.#requests.draw(data.requests);
  }

  async poll() {
    clearTimeout(this.#timer);
    try {
      if (await this.#ask()) return; // for a key: the form polls again
    } catch (error) {
      state("fault of this page", "bad", String(error));
      console.error(error);
    }
    clearTimeout(this.#timer); // of another poll meanwhile
    this.#timer = setTimeout(() => this.poll(), document.hidden ? HIDDEN_POLL_MS : POLL_MS);
  }

  // Ask the server once and show the answer; whether the reader is asked for a key.
  async #ask() {
    const key = session.getItem("paceline-key");
    const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
    let answer;
    let data;
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      answer = await fetch("data", { headers, signal, cache: "no-store" });
      data = answer.ok ? await answer.json() : null;
    } catch {
      this.#lost("no connection", "The server does not answer.");
      return false;
    }
    const isAsked = answer.status === 401;
    if (isAsked) this.#askForKey(key !== null);
    else if (!answer.ok) this.#lost("no data", `The server answers with status ${answer.status}.`);
    else this.#take(data);
    return isAsked;
  }

  #take(data) {
    this.#latest = data;
    this.#heard = Date.now();
    at("login").hidden = true;
    at("panels").hidden = false;
    at("panels").classList.remove("old");
    write(at("age"), "");
    showStatus(data);
    this.draw();
  }

  #lost(words, why) {
    const last = this.#latest;
    state(words, "bad", last === null ? why : `${why} What is shown is of ${clock(last.now)}.`);
    const silent = age((Date.now() - this.#heard) / 1000);
    write(at("age"), last === null ? "" : `last data ${silent} ago`);
    at("panels").classList.toggle("old", last !== null);
  }

  #askForKey(isWrong) {
    state(isWrong ? "key not accepted" : "key needed", isWrong ? "bad" : "");
    at("panels").hidden = true;
    at("login").hidden = false;
    at("key").focus();
  }
}

// ---- controls -----------------------------------------------------------------------------------

// A choice that is kept from visit to visit.
function keep(id, apply) {
  const control = at(id);
  const name = `paceline-${id}`;
  const before = kept.getItem(name);
  if ([...control.options].some(({ value }) => value === before)) control.value = before;
  control.addEventListener("change", () => {
    kept.setItem(name, control.value);
    apply(control.value);
  });
  apply(control.value);
}

function start() {
  keep("theme", (theme) => {
    document.documentElement.dataset.theme = theme;
  });
  const page = new Page();
  keep("span", (seconds) => {
    page.span = Number(seconds);
    page.draw();
  });
  at("login").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = at("key").value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) {
      return state("key not accepted", "bad", "A key has visible ASCII characters only.");
    }
    session.setItem("paceline-key", key);
    at("key").value = "";
    page.poll();
  });
  addEventListener("resize", () => page.draw());
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && at("login").hidden) page.poll();
  });
  page.poll();
}

start();

"use strict";
/* The playground: public endpoints only, no libraries. Text is only ever a text node.
 *
 * A Run is what the server has said about one request; a Panel shows its tokens; `bars` shows the
 * verify steps of the speculative one. */

const $ = (id) => document.getElementById(id);
const make = (tag, name = "", text = "") => {
  const node = document.createElement(tag);
  node.className = name;
  node.textContent = text;
  return node;
};
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const fixed = (number, digits = 1) => (Number.isFinite(number) ? number.toFixed(digits) : "–");
const rateText = (number) => fixed(number, number < 100 ? 1 : 0);
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/* --- the server --------------------------------------------------------------------------- */

let key = ""; // in memory only

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function call(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  const response = await fetch(path, body ? { ...options, body: JSON.stringify(body) } : options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => null); // a proxy's error need not be JSON
  const message = answer?.error?.message ?? `${response.status} ${response.statusText}`;
  if (response.status === 401) askKey();
  throw new ServerError(message, response.status);
}

const get = async (path) => (await call(path)).json();

function askKey() {
  if ($("key-dialog").open) return;
  $("key-error").hidden = !key;
  key = "";
  $("key-dialog").showModal();
}

/** The JSON of a stream's server-sent events. Leaving the loop closes the connection. */
async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new ServerError("The connection ended before the answer did.");
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}

/* --- one request -------------------------------------------------------------------------- */

class Run {
  constructor() {
    this.ids = [];
    this.texts = [];
    this.origins = [{ kind: "plain", step: -1 }]; // the first token comes from the prefill
    this.steps = []; // {length, drafts, kind of the last token, mean}
    this.frames = []; // {seconds, tokens}, of every event
    this.proposed = 0;
    this.info = null;
  }

  /** Takes a chunk of /generate, which has everything so far. */
  apply({ output_ids: ids, token_texts: texts, meta_info: info }) {
    this.ids = ids;
    this.texts = texts;
    this.info = info;
    const proposed = info.spec_num_proposed_drafts > this.proposed; // by the steps that are new
    this.proposed = info.spec_num_proposed_drafts;
    const lengths = info.spec_accept_lengths;
    let total = this.origins.length - 1;
    for (let step = this.steps.length; step < lengths.length; step++) {
      const length = lengths[step];
      const last = proposed ? "bonus" : "plain";
      for (let i = 1; i < length; i++) this.origins.push({ kind: "draft", step });
      if (length) this.origins.push({ kind: last, step });
      total += length;
      this.steps.push({ length, drafts: Math.max(length - 1, 0), last, mean: total / (step + 1) });
    }
    if (info.finish_reason) this.cut();
    this.frames.push({ seconds: info.e2e_latency, tokens: ids.length });
  }

  /** The end may cut a step within its drafts; its last token is a draft then. */
  cut() {
    const drafts = this.steps.reduce((sum, step) => sum + step.drafts, 0);
    const step = this.steps.at(-1);
    if (!step || step.last !== "bonus" || this.info.spec_num_correct_drafts <= drafts) return;
    step.drafts = step.length;
    step.last = "draft";
    this.origins.at(-1).kind = "draft";
  }

  origin(index) {
    return this.origins[index] ?? { kind: "plain", step: -1 };
  }

  /** Tokens per second from the first event to the last one; the prefill is not in it. */
  get rate() {
    return rateBetween(this.frames[0], this.frames.at(-1));
  }

  /** Seconds from the first event to the last one. */
  get seconds() {
    return this.frames.length ? this.frames.at(-1).seconds - this.frames[0].seconds : 0;
  }

  get ended() {
    const reason = this.info?.finish_reason;
    return Boolean(reason) && reason.type !== "abort";
  }

  get mean() {
    return this.steps.length ? this.steps.at(-1).mean : NaN;
  }
}

function rateBetween(first, last) {
  return first && last.seconds > first.seconds
    ? (last.tokens - first.tokens) / (last.seconds - first.seconds) : NaN;
}

/* --- what shows it ------------------------------------------------------------------------ */

class Panel {
  constructor(id) {
    this.root = $(id);
    [this.rate, this.text, this.foot] = [".rate", ".text", ".foot"].map((name) => this.root.querySelector(name));
    this.text.addEventListener("pointerover", (event) => {
      const index = this.spans.indexOf(event.target);
      if (index < 0 || this !== panels.spec) return;
      pick(this.run.origin(index).step);
      bars.scrollTo(bars.picked);
    });
    this.clear("");
  }

  clear(hint) {
    this.run = new Run();
    this.spans = [];
    this.text.replaceChildren();
    this.text.dataset.empty = hint;
    this.showRate(NaN);
    setText(this.foot, "");
  }

  showRate(rate) {
    const parts = Number.isFinite(rate) ? [make("b", "", rateText(rate)), " tokens/s"] : [];
    this.rate.replaceChildren(...parts);
  }

  /** Adds the spans of new tokens; the last token may have got more text. */
  draw() {
    const { run, spans } = this;
    const atEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    const added = document.createDocumentFragment();
    for (let i = Math.max(spans.length - 1, 0); i < run.texts.length; i++) {
      const text = run.texts[i];
      if (!spans[i]) added.append((spans[i] = make("span")));
      setText(spans[i], text);
      const isBreak = /^\s*\n\s*$/.test(text) ? " break" : "";
      spans[i].className = `token ${run.origin(i).kind}${isBreak}`;
    }
    this.text.append(added);
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
    this.showRate(run.rate);
    if (run.info) setText(this.foot, this.facts());
  }

  facts() {
    const { info, frames } = this.run;
    const first = `first token after ${fixed(frames[0].seconds * 1000, 0)} ms`;
    const steps = count(info.spec_verify_ct, this.run.proposed ? "verify step" : "step");
    return [count(info.completion_tokens, "token"), steps, first].join(" · ");
  }

  /** Shows the first `tokens` tokens, as if the rest had not come yet. */
  reveal(tokens) {
    this.spans.forEach((span, i) => span.classList.toggle("later", i >= tokens));
    const last = this.spans[Math.min(tokens, this.spans.length) - 1];
    if (last) this.text.scrollTop = last.offsetTop - this.text.offsetTop - this.text.clientHeight + 60;
  }
}

const panels = { spec: new Panel("spec"), plain: new Panel("plain") };

const NO_DETAIL = $("detail").textContent;

const bars = {
  nodes: [],
  limit: 4, // of the scale
  width: 0, // most tokens per step, of this server
  picked: -1,

  clear() {
    this.nodes = [];
    this.picked = -1;
    setText($("detail"), NO_DETAIL);
    $("bars").replaceChildren();
    $("bars").setAttribute("aria-valuenow", 0);
    this.setLimit(Math.max(this.width, 4));
    this.draw(new Run());
  },

  setLimit(limit) {
    this.limit = limit;
    $("bars").style.setProperty("--unit", `${100 / limit}%`);
    setText($("axis-top"), String(limit));
    setText($("axis-middle"), String(limit / 2));
  },

  draw(run) {
    const longest = run.steps.reduce((most, step) => Math.max(most, step.length), 0);
    if (longest > this.limit) this.setLimit(longest + (longest % 2));
    const root = $("bars");
    const atEnd = root.scrollWidth - root.scrollLeft - root.clientWidth < 40;
    for (let i = Math.max(this.nodes.length - 1, 0); i < run.steps.length; i++) {
      this.nodes[i] ??= root.appendChild(this.bar(i));
      this.fill(this.nodes[i], run.steps[i]); // the last one again: the end may have changed it
    }
    if (atEnd) root.scrollLeft = root.scrollWidth;
    $("mean").replaceChildren(...(run.proposed ? ["mean ", make("b", "", fixed(run.mean, 2))] : []));
    root.setAttribute("aria-valuemax", run.steps.length);
    root.setAttribute("aria-valuetext", this.label(run, longest));
    for (const kind of ["draft", "bonus", "plain"]) {
      const origins = run.origins.slice(0, run.ids.length);
      setText($(`n-${kind}`), String(origins.filter((origin) => origin.kind === kind).length));
    }
  },

  label(run, longest) {
    if (!run.steps.length) return "No verify steps yet";
    return `Accept length of ${count(run.steps.length, "verify step")}: mean ${fixed(run.mean, 2)}, longest ${longest}`;
  },

  bar(step) {
    const node = make("div", "bar");
    node.addEventListener("pointerenter", () => pick(step));
    return node;
  },

  fill(node, step) {
    const part = (kind, tokens) => {
      const piece = make("i", kind);
      piece.style.height = `calc(${tokens} * var(--unit))`;
      piece.style.backgroundSize = `100% ${100 / tokens}%`;
      return piece;
    };
    const mean = make("u");
    mean.style.bottom = `calc(${step.mean} * var(--unit) - 1px)`;
    const parts = [];
    if (step.last !== "draft" && step.length) parts.push(part(step.last, step.length - step.drafts));
    if (step.drafts) parts.push(part("draft", step.drafts));
    node.replaceChildren(...parts, mean);
  },

  reveal(steps) {
    this.nodes.forEach((node, i) => node.classList.toggle("later", i >= steps));
    this.scrollTo(Math.min(steps, this.nodes.length) - 1);
  },

  /** Scrolls as little as shows the bar. */
  scrollTo(step) {
    const [root, node] = [$("bars"), this.nodes[step]];
    if (!node) return;
    const left = node.offsetLeft - root.offsetLeft;
    root.scrollLeft = Math.min(Math.max(root.scrollLeft, left + node.offsetWidth - root.clientWidth), left);
  },
};

/** Marks a verify step in the text and in the chart, and says what it brought. */
function pick(step) {
  const run = panels.spec.run;
  bars.nodes[bars.picked]?.classList.remove("picked");
  bars.picked = step;
  bars.nodes[step]?.classList.add("picked");
  panels.spec.spans.forEach((span, i) => span.classList.toggle("picked", step >= 0 && run.origin(i).step === step));
  const found = run.steps[step];
  if (!found) return;
  const ends = { bonus: " and the bonus token", plain: "no drafts, one token", draft: "; the output ended there" };
  const drafts = found.last === "plain" ? "" : `${count(found.drafts, "draft")} accepted`;
  const detail = `Step ${step + 1}: ${drafts}${ends[found.last]}. Running mean ${fixed(found.mean, 2)}.`;
  setText($("detail"), detail);
  $("bars").setAttribute("aria-valuenow", step + 1);
  $("bars").setAttribute("aria-valuetext", detail);
}

$("bars").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move || !bars.nodes.length) return;
  event.preventDefault();
  pick(Math.min(Math.max(bars.picked + move, 0), bars.nodes.length - 1));
  bars.scrollTo(bars.picked);
});

/* --- generating --------------------------------------------------------------------------- */

let controller = null; // of the requests in flight
let algorithm = null; // null: the server drafts nothing
const LEAST_SECONDS = 0.05; // of both runs, to compare their rates: events come a few ms early or late
const MOST_TOKENS = 4096; // every event of /generate repeats the whole text

function samplingParams() {
  const params = {};
  for (const name of ["temperature", "top_p", "min_p", "max_new_tokens", "top_k"]) {
    const input = $(name);
    if (!input.checkValidity()) {
      const label = input.parentElement.firstChild.textContent.trim();
      input.focus();
      throw new Error(`${label}: ${input.validationMessage}`);
    }
    if (input.value !== "") params[name] = input.valueAsNumber;
  }
  // Both runs get the same seed; a random one is shown.
  params.sampling_seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : $("seed").valueAsNumber;
  return params;
}

/** What /generate starts from: text, or the ids of a conversation in the model's chat template. */
async function input(signal) {
  const prompt = $("prompt").value;
  if (!prompt) throw new Error("The prompt is empty.");
  if ($("mode-text").checked) return { text: prompt };
  const messages = [{ role: "user", content: prompt }];
  if ($("system").value) messages.unshift({ role: "system", content: $("system").value });
  const answer = await (await call("tokenize", { messages }, signal)).json();
  return { input_ids: answer.tokens };
}

async function generate(panel, prompt, params, signal) {
  const body = { ...prompt, sampling_params: params, stream: true, return_token_texts: true };
  panel.root.classList.add("running");
  panel.text.dataset.empty = "Waiting for the first token …";
  let pending = 0; // of an animation frame: many events are drawn at once
  const draw = () => {
    pending = 0;
    panel.draw();
    if (panel === panels.spec) bars.draw(panel.run);
    showRace();
  };
  try {
    for await (const event of events(await call("generate", body, signal))) {
      panel.run.apply(event);
      pending ||= requestAnimationFrame(draw);
    }
  } finally {
    cancelAnimationFrame(pending);
    draw();
    panel.root.classList.remove("running");
  }
  const end = panel.run.info?.finish_reason;
  if (end?.type === "abort") throw new ServerError(end.message ?? "The request was aborted.");
}

function setBusy(busy) {
  $("generate").disabled = busy;
  $("stop").disabled = !busy;
  $("replay").disabled = busy || !panels.plain.run.info?.finish_reason;
}

function showError(message) {
  $("error").hidden = !message;
  setText($("error"), message);
}

async function submit() {
  const compare = Boolean(algorithm) && $("compare").checked;
  showError("");
  try {
    const params = samplingParams();
    controller = new AbortController();
    setBusy(true);
    clear(compare);
    if (narrow.matches) $("stage").scrollIntoView();
    setText($("status"), "Generating …");
    const prompt = await input(controller.signal);
    await generate(panels.spec, prompt, params, controller.signal);
    if (compare) {
      setText($("status"), "The same without drafts …");
      await generate(panels.plain, prompt, { ...params, speculative: false }, controller.signal);
      showVerdict();
    }
    setText($("status"), summary(params, compare));
  } catch (error) {
    const stopped = error.name === "AbortError";
    setText($("status"), stopped ? "Stopped." : "");
    if (!stopped) showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  } finally {
    controller = null;
    setBusy(false);
  }
}

function clear(compare) {
  panels.spec.clear("The text streams in here, every token coloured by its origin.");
  panels.plain.clear("The same without drafts, once the first run has ended.");
  panels.plain.root.hidden = !compare;
  $("verdict").hidden = !compare;
  $("replay").disabled = true;
  $("same").className = "";
  $("same").replaceChildren(make("span", "", "The same prompt and seed, with drafts and then without. Each runs alone."));
  bars.clear();
  showRace();
}

function summary(params, compare) {
  const { run } = panels.spec;
  const parts = [`Done: ${count(run.ids.length, "token")}`];
  if (run.proposed) parts.push(`accept length ${fixed(run.mean, 2)}`);
  if (compare) parts.push($("same").classList.contains("no") ? "texts differ" : "identical text");
  return `${parts.join(", ")}. Seed ${params.sampling_seed}.`;
}

/** Where two lists of token ids differ first; -1 if they are equal. */
function firstDifference(a, b) {
  for (let i = 0; i < Math.max(a.length, b.length); i++) if (a[i] !== b[i]) return i;
  return -1;
}

/** Rates, also of runs that still go on. */
function showRace() {
  const rates = { spec: panels.spec.run.rate, plain: panels.plain.run.rate };
  const most = Math.max(...Object.values(rates).filter(Number.isFinite), 1);
  for (const [name, rate] of Object.entries(rates)) {
    $(`race-${name}`).style.width = `${(100 * (rate || 0)) / most}%`;
    setText($(`race-${name}-rate`), rate ? `${rateText(rate)} tok/s` : "");
  }
  const missing = noSpeedup(panels.spec.run, panels.plain.run);
  const shown = missing ? "–" : `${fixed(rates.spec / rates.plain)}×`;
  $("speedup").replaceChildren(shown, make("small", "", missing ? `speed-up: ${missing}` : "speed-up"));
}

/** Why two runs give no speed-up; empty if they do. */
function noSpeedup(spec, plain) {
  if (!spec.ended || !plain.ended) return "once both runs have ended";
  if (!spec.proposed) return "no step had drafts";
  if (!spec.info.spec_num_correct_drafts) return "no draft was accepted";
  const short = Math.min(spec.seconds, plain.seconds) < LEAST_SECONDS;
  return short ? "too short to measure, generate more tokens" : "";
}

function showVerdict() {
  const [spec, plain] = [panels.spec.run, panels.plain.run];
  const at = firstDifference(spec.ids, plain.ids);
  const equal = at < 0;
  $("same").classList.toggle("no", !equal);
  const notes = equal ? ["✓ Identical: ", `all ${count(spec.ids.length, "token")} are the same, with drafts and without.`]
    : [`≠ The texts differ from token ${at + 1} on. `, "In bfloat16 two nearly tied tokens may round differently; float32 gives equal texts."];
  $("same").replaceChildren(notes[0], make("span", "", notes[1]));
  for (const panel of Object.values(panels)) panel.spans[at]?.classList.add("differs");
}

/** Both recordings at once, at the times at which their tokens came. */
async function replay() {
  const speed = Number($("speed").value);
  const shown = Object.values(panels);
  const end = Math.max(...shown.map((panel) => panel.run.frames.at(-1).seconds));
  const stop = new AbortController();
  controller = stop;
  setBusy(true);
  setText($("status"), "Replaying both runs at the times measured.");
  const begin = performance.now();
  for (let now = 0; now < end && !stop.signal.aborted;) {
    now = (speed * (performance.now() - begin)) / 1000;
    for (const panel of shown) {
      const { run } = panel;
      const frame = run.frames.findLast(({ seconds }) => seconds <= now) ?? { tokens: 0, seconds: 0 };
      panel.reveal(frame.tokens);
      panel.showRate(rateBetween(run.frames[0], frame));
      if (panel === panels.spec) bars.reveal(frame.tokens ? run.origin(frame.tokens - 1).step + 1 : 0);
    }
    await new Promise(requestAnimationFrame);
  }
  for (const panel of shown) {
    panel.reveal(Infinity);
    panel.showRate(panel.run.rate);
  }
  bars.reveal(Infinity);
  setText($("status"), "");
  controller = null;
  setBusy(false);
}

/* --- controls ----------------------------------------------------------------------------- */

const narrow = matchMedia("(max-width: 900px)");
if (narrow.matches) $("sampling").open = false;

const EXAMPLES = {
  problem: { mode: "chat", temperature: 0.7, prompt: "Each hour Kim packs 14 magnets while Simon packs only 12. After 11 hours, how many magnets is Kim ahead?" },
  code: { mode: "text", temperature: 0, prompt: "import json\nimport os\n\n\ndef load_config(path):\n    with open(path) as f:\n" },
};

function setMode(mode) {
  $(`mode-${mode}`).checked = true;
  $("system-field").hidden = mode !== "chat";
  setText($("prompt-label"), mode === "chat" ? "Message" : "Prompt");
}

function setExample(name) {
  const { mode, temperature, prompt } = EXAMPLES[name];
  $("temperature").value = temperature;
  setMode($("mode-chat").disabled ? "text" : mode);
  $("prompt").value = prompt;
}

for (const radio of document.querySelectorAll("[name=mode]")) radio.addEventListener("change", () => setMode(radio.value));
for (const chip of document.querySelectorAll("[data-example]")) chip.addEventListener("click", () => setExample(chip.dataset.example));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!controller) submit();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
$("stop").addEventListener("click", () => controller?.abort());
$("replay").addEventListener("click", () => { if (!controller) replay(); });
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  $("key-dialog").close();
  connect();
});

/* --- the server's state ------------------------------------------------------------------- */

let last = null; // {tokens, time} of the counters, for a rate

async function connect() {
  try {
    const [server, model] = await Promise.all([get("server_info"), get("model_info")]);
    const { explain } = server;
    algorithm = explain.num_verify_tokens > 1 ? explain.algorithm : null;
    bars.width = algorithm ? explain.num_verify_tokens : 0;
    const maxPrompt = model.context_length;
    $("max_new_tokens").max = Math.min(maxPrompt, MOST_TOKENS);
    const drafts = algorithm ? `${algorithm}, up to ${explain.num_verify_tokens} tokens per verify step` : "no drafts: start the server with --speculative-algorithm";
    const parts = [model.served_model_name, explain.architecture, explain.device, explain.dtype, drafts, `context ${maxPrompt}`];
    setText($("settings"), parts.join(" · "));
    setText($("spec-title"), algorithm ?? "Output");
    setText($("race-name"), algorithm ?? "");
    $("compare").disabled = !algorithm;
    if (!algorithm) $("compare").checked = false;
    $("mode-chat").disabled = !model.has_chat_template;
    if (!$("prompt").value) setExample("problem");
    clear(Boolean(algorithm));
    watch();
  } catch (error) {
    showHealth(false, error);
    if (error.status === 401) return; // the dialog connects
    await wait(2000);
    connect();
  }
}

function showHealth(ok, error) {
  $("health").className = `pill ${ok ? "ok" : "bad"}`;
  const problem = error instanceof TypeError ? "Not reachable" : error?.status === 401 ? "API key needed" : "Not ready";
  setText($("health"), ok ? "Ready" : problem);
  $("health").title = ok ? "" : error.message;
}

let watching = false;

async function watch() {
  if (watching) return;
  watching = true;
  while (watching) {
    if (!document.hidden) {
      try {
        showGauges(await get("v1/loads"), (await get("server_info")).internal_states);
        showHealth(true);
      } catch (error) {
        clearGauges();
        if (error.status === 401) break;
        showHealth(false, error);
      }
    }
    await wait(1000);
  }
  watching = false;
}

/** What was known of the engine no longer holds. */
function clearGauges() {
  last = null;
  for (const name of ["running", "waiting", "accept", "rate"]) setText($(`g-${name}`), "–");
  setText($("g-pages-text"), "");
  for (const part of $("g-pages").children) part.style.width = 0;
}

function showGauges(load, states) {
  const total = (name) => states.reduce((sum, state) => sum + state[name], 0); // of all replicas
  const used = load.num_pages - load.num_free_pages - load.num_cached_pages;
  const percent = (pages) => `${(100 * pages) / load.num_pages}%`;
  setText($("g-running"), String(load.num_running_reqs));
  setText($("g-waiting"), String(load.num_waiting_reqs));
  setText($("g-pages-text"), `${used} in use, ${load.num_cached_pages} cached, of ${load.num_pages}`);
  $("g-pages").children[0].style.width = percent(used);
  $("g-pages").children[1].style.width = percent(load.num_cached_pages);
  // Of the steps that had drafts: plain requests would hide what speculation does.
  setText($("g-accept"), fixed(1 + total("spec_decode_num_accepted_tokens") / total("spec_decode_num_drafts"), 2));
  const now = { tokens: total("decode_tokens"), time: performance.now() };
  if (last) setText($("g-rate"), fixed(Math.max(0, (1000 * (now.tokens - last.tokens)) / (now.time - last.time)), 0));
  last = now;
}

connect();

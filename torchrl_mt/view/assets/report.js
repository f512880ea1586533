"use strict";
/* The page of a report of episodes. What it shows is written in the address after "#"; `show` draws that.
   In order: reading the data, the state, the list, search, blocks of text, one episode laid out, the three
   views, the tooltip, and what the reader does. Text of episodes enters the page as text nodes alone. */

const ROW_HEIGHT = 52; // pixels, as in report.css
const BLOCK_TOKENS = { dialogue: 200, group: 50, tree: 200 };
const PROSE_CHARACTERS = 2000; // of a block of text that was not sampled
const LIVE_NODES = 3000; // that blocks near the viewport may have together; the page stays below 5,000
const FOLD_CHARACTERS = 1200; // longer reasoning is folded
const KEPT_EPISODES = 32; // in memory with all their values

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
const readable = (number) => (Number.isNaN(number) ? "none" : String(Number(number.toPrecision(6))));
const pause = () => new Promise((resolve) => setTimeout(resolve));

/** An element with a class and with children: elements, or strings that become text. */
function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// ---- Reading the data ----

/** The text of a data script, which leaves the page: browsers keep long text in many nodes. */
function take(id) {
  const element = byId(id);
  const text = element.textContent;
  element.remove();
  return text;
}

const index = JSON.parse(take("index"));
const columns = new Map(index.columns.map((column) => [column.key, column]));
const parts = take("parts").trim().split("\n");
const images = new Map(take("images").trim().split("\n").map((line) => [line.split(" ", 1)[0], line]));
const records = new Map(index.episodes.map((record, line) => [String(record.id), { ...record, line }]));
const loaded = new Map(); // promises of episodes, the oldest first

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new DecompressionStream("deflate");
  const writer = stream.writable.getWriter();
  const written = writer.write(bytes).then(() => writer.close());
  const [buffer] = await Promise.all([new Response(stream.readable).arrayBuffer(), written]);
  return new Uint8Array(buffer);
}

async function readContent(record) {
  return JSON.parse(new TextDecoder().decode(await inflate(parts[record.line].split(" ")[0])));
}

/** The values of each column. They are stored byte by byte: all first bytes, then all second ones... */
function unshuffle(bytes, keys, length) {
  const values = new Map();
  keys.forEach((key, number) => {
    const column = new Uint8Array(4 * length);
    for (let k = 0; k < column.length; k++) {
      column[k] = bytes[(4 * number + (k & 3)) * length + (k >> 2)];
    }
    values.set(key, new Float32Array(column.buffer));
  });
  return values;
}

/** An episode with its values; its turns know where their tokens and their characters start. */
async function readEpisode(record) {
  const content = await readContent(record);
  let length = 0;
  for (const turn of content.turns) {
    turn.start = length;
    length += turn.pieces.length;
    turn.offsets = [0];
    for (const piece of turn.pieces) turn.offsets.push(turn.offsets.at(-1) + piece.length);
  }
  const bytes = await inflate(parts[record.line].split(" ")[1]);
  const values = unshuffle(bytes, content.columns, length);
  return { ...content, record, length, values, texts: textsOf(content.turns) };
}

function load(record) {
  if (!loaded.has(record.id)) loaded.set(record.id, readEpisode(record));
  if (loaded.size > KEPT_EPISODES) loaded.delete(loaded.keys().next().value);
  return loaded.get(record.id);
}

/** The texts of a message, each with its kind, in the order in which they are shown. */
function textsOfMessage(message) {
  const calls = (message.tool_calls ?? []).map((call) => ["call", `${call.name}\n${pretty(call.arguments)}`]);
  return [["reasoning", message.reasoning], ["content", message.content], ...calls].filter(([, text]) => text);
}

/** All texts of an episode, in the order in which the dialogue shows them: what the search goes through. */
function textsOf(turns) {
  return turns.flatMap((turn) => {
    const given = turn.given.flatMap(textsOfMessage).map(([, text]) => text);
    if (turn.pieces.length) return [...given, turn.pieces.join("")];
    return [...given, ...(turn.said ? textsOfMessage(turn.said) : []).map(([, text]) => text)];
  });
}

// ---- The state, kept in the address ----

const DEFAULTS = {
  episode: "", turn: "", view: "dialogue", against: "", color: index.columns[0]?.key ?? "none", search: "",
  sort: "id", order: "up", min: "", max: "", oldest: "", newest: "", group: "", stop: "", kind: "",
};
const FILTERS = ["min", "max", "oldest", "newest", "group", "stop", "kind"];
let state = { ...DEFAULTS };

function readAddress() {
  state = { ...DEFAULTS };
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key in DEFAULTS) state[key] = value;
  }
  return show();
}

function go(changes, remember = true) {
  state = { ...state, ...changes };
  const set = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  history[remember ? "pushState" : "replaceState"](null, "", `#${new URLSearchParams(set)}`);
  return show();
}

async function show() {
  for (const field of document.querySelectorAll("aside [name], main [name]")) {
    if (field.value !== state[field.name]) field.value = state[field.name];
  }
  if (found.query !== state.search) countHits(state.search);
  drawList();
  await drawMain();
}

// ---- The list ----

const outcome = (record) => (record.rejected ? `rejected: ${record.rejected}` : record.stop);
const sampleName = ({ group, sample, id }) =>
  group === null ? `Episode ${id}` : `Group ${group}${sample === null ? "" : `, sample ${sample}`}`;
const SORTS = {
  id: (record) => record.id, reward: (record) => record.reward, group: (record) => record.group,
  stop: outcome, tokens: (record) => record.tokens, turns: (record) => record.turns,
  version: (record) => record.tail,
};
const KINDS = {
  kept: (record) => !record.rejected, rejected: (record) => record.rejected, evaluation: (record) => record.eval,
};
const rewards = index.episodes.map((record) => record.reward).filter((reward) => reward !== null);
const leastReward = rewards.reduce((a, b) => Math.min(a, b), 0);
const greatestReward = rewards.reduce((a, b) => Math.max(a, b), leastReward + 1e-9);
const list = byId("list");
let chosen = [];

/** Whether the range low..high meets the bounds, which are empty where nothing is asked. */
function meets(low, high, least, most) {
  if (least === "" && most === "") return true;
  return low !== null && (least === "" || high >= Number(least)) && (most === "" || low <= Number(most));
}

function passes(record) {
  return meets(record.reward, record.reward, state.min, state.max)
    && meets(record.head, record.tail ?? record.head, state.oldest, state.newest)
    && (state.group === "" || String(record.group) === state.group)
    && (state.stop === "" || String(outcome(record)) === state.stop)
    && (!(state.kind in KINDS) || KINDS[state.kind](record))
    && (!found.done || !found.query || found.counts.has(record.id));
}

/** Orders numbers and words; what is not known comes last. */
function compare(a, b, sign) {
  if (a === b) return 0;
  if (a === null || b === null) return a === null ? 1 : -1;
  return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

function drawList() {
  const value = SORTS[state.sort] ?? SORTS.id;
  const sign = state.order === "down" ? -1 : 1;
  chosen = [...records.values()].filter(passes).sort((a, b) => compare(value(a), value(b), sign));
  byId("count").textContent = chosen.length === records.size
    ? count(records.size, "episode") : `${chosen.length.toLocaleString("en")} of ${count(records.size, "episode")}`;
  const active = FILTERS.filter((key) => state[key] !== "").length;
  document.querySelector("#filters summary").textContent = active ? `Filters, ${active} set` : "Filters";
  const current = chosen.indexOf(records.get(state.episode)) * ROW_HEIGHT;
  byId("rows").style.height = `${chosen.length * ROW_HEIGHT}px`;
  if (current >= 0 && current < list.scrollTop) list.scrollTop = current;
  list.scrollTop = Math.max(list.scrollTop, current + ROW_HEIGHT - list.clientHeight);
  drawRows();
}

/** Makes the rows that are in sight. */
function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 3);
  const rows = chosen.slice(first, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 6);
  byId("rows").replaceChildren(...rows.map((record, number) => makeRow(record, first + number)));
}

const shortReward = (reward) => (reward === null ? "–" : reward.toFixed(2).replace("-", "−"));
const weights = ({ head, tail }) => (head === null ? null : `weights ${head}${tail === head ? "" : `–${tail}`}`);

function makeRow(record, place) {
  const hits = found.counts.get(record.id);
  const details = [
    hits ? count(hits, "hit") : null, outcome(record), count(record.turns, "turn"), count(record.tokens, "token"),
  ];
  const reward = make("span", "reward", shortReward(record.reward));
  const share = record.reward === null ? 0 : (record.reward - leastReward) / (greatestReward - leastReward);
  reward.style.setProperty("--share", `${100 * share}%`);
  const row = make("div", record.rejected ? "row rejected" : "row", reward,
    make("span", "name", sampleName(record)), make("span", "weights", weights(record)),
    make("span", "details", details.filter(Boolean).join(" · ")));
  row.style.top = `${place * ROW_HEIGHT}px`;
  row.id = `row-${record.id}`;
  row.setAttribute("role", "option");
  row.setAttribute("aria-posinset", place + 1);
  row.setAttribute("aria-setsize", chosen.length);
  row.setAttribute("aria-selected", String(record.id) === state.episode);
  row.onclick = () => openEpisode(record);
  return row;
}

function openEpisode(record) {
  showEpisodes(false);
  return go({ episode: String(record.id), turn: "", against: "" });
}

function step(by) {
  const place = chosen.indexOf(records.get(state.episode));
  const next = chosen[place < 0 ? 0 : place + by];
  return next && openEpisode(next);
}

// ---- Search ----

let found = { query: "", counts: new Map(), done: true };

function findHits(texts, query) {
  const hits = [];
  const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
  texts.forEach((text, segment) => {
    for (const { index: from } of query ? text.matchAll(pattern) : []) {
      hits.push({ number: hits.length, segment, from, to: from + query.length });
    }
  });
  return hits;
}

/** Counts the hits in every episode, a few episodes at a time: the page answers meanwhile. */
async function countHits(query) {
  const mine = (found = { query, counts: new Map(), done: !query });
  const all = [...records.values()];
  let total = 0;
  for (let k = 0; query && k < all.length; k += 8) {
    byId("found").textContent = `Searching, ${Math.round((100 * k) / all.length)} %`;
    for (const record of all.slice(k, k + 8)) {
      record.texts ??= await readContent(record).then(({ turns }) => textsOf(turns), () => []);
      const { length } = findHits(record.texts, query);
      if (length) mine.counts.set(record.id, length);
      total += length;
    }
    await pause();
    if (found !== mine) return;
  }
  mine.done = true;
  byId("found").textContent = query ? `${count(total, "hit")} in ${count(mine.counts.size, "episode")}` : "";
  drawList();
}

let currentHit = null;

/** Goes to the next hit (or, with -1, to the one before), in the next episode after the last one. */
async function jumpToHit(by) {
  if (state.view !== "dialogue") await go({ view: "dialogue" });
  const [sheet] = sheets;
  if (!state.search || !sheet) return;
  let number = currentHit === null ? (by > 0 ? 0 : sheet.hits.length - 1) : currentHit + by;
  if (!sheet.hits[number]) {
    const before = state.episode;
    await step(by);
    if (state.episode === before) return;
    number = by > 0 ? 0 : sheets[0].hits.length - 1;
  }
  currentHit = number;
  sheets[0]?.showHit(number);
}

// ---- Blocks: text that is one node far from the viewport, and many elements near it ----

const blocks = new Map(); // by their element
const near = new Set();
let observer = null;

/** Forgets all blocks; new ones are watched inside `root`. */
function resetBlocks(root) {
  observer?.disconnect();
  blocks.clear();
  near.clear();
  hideTip();
  observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) near[isIntersecting ? "add" : "delete"](target);
    fillNearest(root);
  }, { root, rootMargin: root === main ? "300px 0px" : "0px" });
}

/** block: {text, cost: nodes when filled, fill: makes these nodes, sheet, ...what the sheet finds it by} */
function makeBlock(block) {
  const element = make("span", "block", block.text);
  blocks.set(element, block);
  observer.observe(element);
  return element;
}

/** Fills the blocks near the viewport, those nearest its middle first, as far as LIVE_NODES goes. */
function fillNearest(root) {
  const view = root.getBoundingClientRect();
  const distance = new Map([...near].map((element) => {
    const { left, right, top, bottom } = element.getBoundingClientRect();
    return [element, Math.hypot(left + right - view.left - view.right, top + bottom - view.top - view.bottom)];
  }));
  let spent = 0;
  const lucky = [...near].sort((a, b) => distance.get(a) - distance.get(b))
    .filter((element) => (spent += blocks.get(element).cost) <= LIVE_NODES);
  const wanted = new Set(lucky);
  for (const [element, block] of blocks) if (block.filled && !wanted.has(element)) emptyBlock(element, block);
  for (const element of lucky) fillBlock(element, blocks.get(element));
}

function fillBlock(element, block) {
  if (block.filled) return;
  element.replaceChildren(...block.fill());
  block.filled = true;
}

function emptyBlock(element, block) {
  element.textContent = block.text;
  block.filled = false;
}

function repaint() {
  for (const [element, block] of blocks) {
    if (!block.filled) continue;
    block.filled = false;
    fillBlock(element, block);
  }
}

// ---- Colours ----

const tint = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(60 * share)}%, transparent)`;

/** The background of a token with this value, or none. */
function shade(column, value) {
  if (Number.isNaN(value)) return "";
  const { kind, low, high, key } = column;
  const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
  if (kind === "low") return tint("warm", 1 - share);
  if (kind === "high") return tint("warm", share);
  if (kind === "steps") {
    const mixed = `color-mix(in oklab, var(--late) ${Math.round(100 * share)}%, var(--early))`;
    return `color-mix(in srgb, ${mixed} 45%, transparent)`;
  }
  const centre = key === "ratio" ? 1 : 0;
  const reach = Math.max(Math.abs(low - centre), Math.abs(high - centre)) || 1;
  return tint(value < centre ? "minus" : "plus", Math.min(1, Math.abs(value - centre) / reach));
}

function drawLegend(episode) {
  const column = columns.get(state.color);
  byId("legend").replaceChildren();
  if (!column) return;
  if (episode && !episode.values.has(column.key)) return byId("legend").append("not recorded in this episode");
  const stops = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((k) => shade(column, column.low + ((column.high - column.low) * k) / 8));
  const ramp = make("span", "ramp");
  ramp.style.background = `linear-gradient(90deg, ${stops.map((stop) => stop || "transparent").join(", ")})`;
  byId("legend").append(readable(column.low), ramp, `${readable(column.high)} ${column.unit ?? ""}`);
}

// ---- One episode laid out as text ----

let sheets = []; // those on the page

/** Lays out the turns of one episode. Texts are made in the order of `textsOf`, so each finds its hits. */
class Sheet {
  constructor(episode, blockTokens, partings = []) {
    Object.assign(this, { episode, blockTokens, partings });
    this.common = partings.length ? Math.min(...partings) : 0; // tokens at the beginning that others share
    this.hits = findHits(episode.texts, state.search);
    this.segment = -1;
    this.severalRows = new Set(episode.turns.map((turn) => turn.row)).size > 1;
  }

  /** The hits of the text that is made now, between two of its characters. */
  hitsBetween(start, end) {
    return this.hits.filter(({ segment, from, to }) => segment === this.segment && from < end && to > start);
  }

  prose(className, text, searched = true) {
    const element = make("div", className);
    if (searched) this.segment += 1;
    for (let start = 0; start < text.length; start += PROSE_CHARACTERS) {
      const end = Math.min(start + PROSE_CHARACTERS, text.length);
      const hits = searched ? this.hitsBetween(start, end) : [];
      element.append(hits.length ? makeBlock({
        sheet: this, hits, text: text.slice(start, end), cost: 3 * hits.length,
        fill: () => markHits(text, start, end, hits),
      }) : text.slice(start, end));
    }
    return element;
  }

  /** What a message says: reasoning (folded if long), text, tool calls and images. */
  messageBody(message) {
    const body = make("div", "body");
    for (const [kind, text] of textsOfMessage(message)) {
      const element = this.prose(kind, text);
      const folded = kind === "reasoning" && text.length > FOLD_CHARACTERS;
      body.append(folded ? make("details", "", make("summary", "", "Reasoning"), element) : element);
    }
    for (const key of message.images ?? []) body.append(makeImage(key));
    return body;
  }

  tokens(turn, from, to) {
    const element = make("div", "tokens");
    for (let first = from; first < to; first += this.blockTokens) {
      const last = Math.min(first + this.blockTokens, to);
      const hits = this.hitsBetween(turn.offsets[first], turn.offsets[last]);
      element.append(makeBlock({
        sheet: this, turn, hits, first, last, text: turn.pieces.slice(first, last).join(""),
        cost: 2 * (last - first), fill: () => this.makeTokens(turn, first, last, hits),
      }));
    }
    return element;
  }

  makeTokens(turn, first, last, hits) {
    const column = columns.get(state.color);
    const values = column && this.episode.values.get(column.key);
    return turn.pieces.slice(first, last).map((piece, number) => {
      const here = turn.start + first + number;
      const [start, end] = [turn.offsets[first + number], turn.offsets[first + number + 1]];
      const hit = hits.length ? hits.find(({ from, to }) => from < end && to > start) : undefined;
      const names = ["token"];
      if (/^<[|\w/].*>$/.test(piece)) names.push("special");
      if (piece.includes("\n")) names.push("newline");
      if (here < this.common) names.push("common");
      if (this.partings.includes(here)) names.push("parting");
      if (hit) names.push("hit");
      const token = make("span", names.join(" "), piece);
      token.tabIndex = -1;
      if (hit) token.dataset.hit = hit.number;
      if (values) token.style.backgroundColor = shade(column, values[here]);
      return token;
    });
  }

  /** The sampled reply; what it says is shown instead where its tokens are not known. */
  reply(turn) {
    if (!turn.pieces.length) return turn.said ? this.messageBody(turn.said) : make("div", "body quiet", "No reply.");
    this.segment += 1;
    const body = make("div", "body reply");
    const [from, to] = longReasoning(turn);
    if (from > 0) body.append(this.tokens(turn, 0, from));
    if (to > from) {
      const summary = make("summary", "", `Reasoning, ${count(to - from, "token")}`);
      body.append(make("details", "", summary, this.tokens(turn, from, to)));
    }
    if (to < turn.pieces.length) body.append(this.tokens(turn, to, turn.pieces.length));
    for (const [kind, text] of turn.said ? textsOfMessage(turn.said) : []) {
      if (kind === "call") body.append(this.prose("call", text, false));
    }
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", `Tokens of turn ${turn.turn}: go through them with the arrow keys`);
    return body;
  }

  turn(turn, before) {
    const title = make("a", "", `Turn ${turn.turn}`);
    title.href = `#${new URLSearchParams({ episode: this.episode.record.id, turn: turn.turn })}`;
    const expected = before ? before.turn : -1;
    const origin = turn.parent === expected ? null : turn.parent < 0 ? "starts anew" : `goes on from turn ${turn.parent}`;
    const notes = [this.severalRows ? `row ${turn.row}` : null, origin].filter(Boolean).join(", ");
    const given = turn.given.map((message) => makeMessage(
      message.name ? `${message.role} ${message.name}` : message.role, this.messageBody(message), message.role));
    const reply = makeMessage(turn.said?.role ?? "assistant", this.reply(turn), "sampled");
    const ends = [turn.reward === null ? null : `reward ${readable(turn.reward)}`,
      turn.finish ? `finish reason ${turn.finish}` : null].filter(Boolean).join(", ");
    const section = make("section", "turn", make("h3", "", title, make("span", "quiet", notes)), ...given, reply);
    if (ends) section.append(make("p", "ends", ends));
    section.dataset.turn = turn.turn;
    return section;
  }

  turns() {
    return this.episode.turns.map((turn, place) => this.turn(turn, this.episode.turns[place - 1]));
  }

  /** Scrolls to the block that passes the test; its elements are there when this returns. */
  reach(test) {
    for (const [element, block] of blocks) {
      if (block.sheet !== this || !test(block)) continue;
      for (const fold = element.closest("details"); fold && !fold.open;) fold.open = true;
      fillBlock(element, block);
      return element;
    }
    return null;
  }

  showHit(number) {
    const element = this.reach(({ hits }) => hits.some((hit) => hit.number === number));
    document.querySelectorAll(".current").forEach((hit) => hit.classList.remove("current"));
    const marks = element?.querySelectorAll(`[data-hit="${number}"]`) ?? [];
    marks.forEach((mark) => mark.classList.add("current"));
    marks[0]?.scrollIntoView({ block: "center" });
    byId("found").textContent = `Hit ${number + 1} of ${this.hits.length} in this episode`;
  }

  focusToken(here) {
    const element = this.reach(({ turn, first, last }) => turn && here >= turn.start + first && here < turn.start + last);
    if (!element) return;
    const { turn, first } = blocks.get(element);
    element.children[here - turn.start - first].focus();
  }
}

/** The tokens of a long reasoning: from, to; both are 0 where nothing is to be folded. */
function longReasoning({ said, pieces, offsets }) {
  const reasoning = said?.reasoning?.trim() ?? "";
  const start = reasoning.length > FOLD_CHARACTERS ? pieces.join("").indexOf(reasoning) : -1;
  if (start < 0) return [0, 0];
  const end = start + reasoning.length;
  return [offsets.findIndex((_, k) => offsets[k + 1] > start), offsets.findIndex((offset) => offset >= end)];
}

function markHits(text, start, end, hits) {
  const nodes = [];
  let at = start;
  for (const { from, to, number } of hits) {
    const [first, last] = [Math.max(from, start), Math.min(to, end)];
    const mark = make("mark", "hit", text.slice(first, last));
    mark.dataset.hit = number;
    nodes.push(text.slice(at, first), mark);
    at = last;
  }
  return [...nodes, text.slice(at, end)];
}

function makeMessage(label, body, kind) {
  return make("div", `message ${kind === "tool" || kind === "sampled" ? kind : ""}`, make("span", "role", label), body);
}

function makeImage(key) {
  const [, type, data] = (images.get(key) ?? "").split(" ");
  if (!data || !type.startsWith("image/")) return make("p", "quiet", `Image ${key} is not in this report.`);
  const image = make("img", "");
  image.src = `data:${type};base64,${data}`;
  image.alt = `Image ${key}`;
  return image;
}

// ---- The episode and its three views ----

let drawings = 0;
let drawn = "";

async function drawMain() {
  const record = records.get(state.episode) ?? chosen[0] ?? [...records.values()][0];
  if (!record) return byId("page").replaceChildren(make("p", "quiet", "This report has no episodes."));
  if (state.episode === "") state.episode = String(record.id);
  const key = JSON.stringify([record.id, state.view, state.search, state.against]);
  const mine = ++drawings;
  try {
    const episode = await load(record);
    const members = state.view === "group" ? await Promise.all(groupOf(record).map(load)) : [];
    if (mine !== drawings) return;
    if (drawn !== key) drawPage(episode, members);
    else repaint();
    drawn = key;
    drawLegend(episode);
    byId("page").querySelector(`[data-turn="${CSS.escape(state.turn)}"]`)?.scrollIntoView();
  } catch (error) {
    byId("page").replaceChildren(make("p", "quiet", `Episode ${record.id} could not be read: ${error.message}`));
  }
}

function drawPage(episode, members) {
  const views = { dialogue: true, group: groupOf(episode.record).length > 1, tree: isTree(episode.turns) };
  const view = views[state.view] ? state.view : "dialogue";
  for (const button of document.querySelectorAll("[data-view]")) {
    button.disabled = !views[button.dataset.view];
    button.setAttribute("aria-pressed", button.dataset.view === view);
  }
  const samePlace = drawn && JSON.parse(drawn)[0] === episode.record.id;
  currentHit = null;
  drawHead(episode);
  byId("page").className = view;
  byId("page").replaceChildren();
  resetBlocks(view === "group" ? byId("page") : main);
  ({ dialogue: drawDialogue, group: drawGroup, tree: drawTree })[view](episode, members);
  if (drawn && !samePlace) byId("head").scrollIntoView();
  drawList();
}

function drawHead({ record, facts }) {
  const entries = {
    Reward: record.reward === null ? null : readable(record.reward), Turns: record.turns,
    "Sampled tokens": record.tokens.toLocaleString("en"), Length: record.length.toLocaleString("en"),
    "Stop reason": record.stop, Weights: weights(record)?.replace("weights ", ""), Use: record.eval ? "evaluation" : null,
    Source: index.sources.length > 1 ? index.sources[record.source] : null, Task: record.task,
  };
  const known = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined);
  const name = record.group === null ? null : make("span", "quiet", sampleName(record).toLowerCase());
  byId("head").replaceChildren(make("h2", "", `Episode ${record.id}`, name),
    make("dl", "facts", ...known.map(([key, value]) => make("div", "", make("dt", "", key), make("dd", "", value)))));
  if (record.rejected) byId("head").append(make("p", "refused", `Rejected: ${record.rejected}`));
  const rows = Object.entries(facts ?? {}).map(([key, value]) =>
    make("tr", "", make("th", "", key), make("td", "", pretty(value))));
  if (rows.length) byId("head").append(make("details", "", make("summary", "", "More facts"), make("table", "", ...rows)));
}

function drawDialogue(episode) {
  const sheet = new Sheet(episode, BLOCK_TOKENS.dialogue);
  sheets = [sheet];
  byId("page").append(...sheet.turns());
}

const groupOf = ({ id, group, source }) => [...records.values()]
  .filter((other) => other.id === id || (group !== null && other.group === group && other.source === source))
  .sort((a, b) => compare(a.reward, b.reward, -1));

/** The first token at which two episodes differ, or the start of the turn before which they were told different things. */
function parting(one, other) {
  for (const [place, turn] of one.turns.entries()) {
    const twin = other.turns[place];
    if (!twin || JSON.stringify(turn.given) !== JSON.stringify(twin.given)) return turn.start;
    const differs = turn.ids && twin.ids ? (k) => turn.ids[k] !== twin.ids[k] : (k) => turn.pieces[k] !== twin.pieces[k];
    const at = turn.pieces.findIndex((_, k) => differs(k));
    if (at >= 0 || twin.pieces.length > turn.pieces.length) return turn.start + Math.max(at, 0);
  }
  return one.length;
}

/** The episodes of a group side by side; each is compared with one of them, which is marked at every parting. */
function drawGroup(episode, members) {
  const against = members.find(({ record }) => String(record.id) === state.against) ?? members[0];
  const others = members.filter((member) => member !== against);
  sheets = members.map((member) => new Sheet(member, BLOCK_TOKENS.group,
    member === against ? others.map((other) => parting(against, other)) : [parting(member, against)]));
  const made = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting || target.children.length > 1) continue;
      target.append(...sheets[target.dataset.place].turns());
    }
  }, { root: byId("page") });
  members.forEach((member, place) => {
    const column = make("div", "column", makeColumnHead(member, member === against, member === episode));
    column.dataset.place = place;
    byId("page").append(column);
    made.observe(column);
  });
}

function makeColumnHead({ record }, isReference, isCurrent) {
  const open = make("button", "link", sampleName(record));
  open.onclick = () => go({ episode: String(record.id), view: "dialogue" });
  const button = make("button", "small", isReference ? "The others are compared with this" : "Compare with this");
  button.disabled = isReference;
  button.onclick = () => go({ against: String(record.id) });
  const details = [outcome(record), count(record.turns, "turn"), count(record.tokens, "token")];
  return make("header", isCurrent ? "current-member" : "", make("strong", "", shortReward(record.reward)), open,
    make("p", "quiet", details.filter(Boolean).join(" · ")), button);
}

const isTree = (turns) => turns.some(({ parent, row }, k) => parent !== (turns[k - 1]?.turn ?? -1) || row !== turns[0].row);

/** The turns as a tree: it is indented where a turn has several that go on from it. */
function drawTree({ turns }) {
  sheets = [];
  const children = Map.groupBy(turns, ({ parent }) => (parent < 0 ? -1 : parent));
  const waiting = (children.get(-1) ?? []).map((turn) => [turn, 0]).reverse();
  while (waiting.length) {
    const [turn, depth] = waiting.pop();
    const words = turn.pieces.length ? turn.pieces.slice(0, 60).join("") : turn.said?.content ?? "";
    const button = make("button", "branch", make("strong", "", `Turn ${turn.turn}`),
      make("span", "quiet", `row ${turn.row}`), make("span", "number", turn.reward === null ? "" : readable(turn.reward)),
      make("span", "words", words.slice(0, 200)));
    button.style.setProperty("--depth", depth);
    button.onclick = () => go({ view: "dialogue", turn: String(turn.turn) });
    byId("page").append(button);
    const next = children.get(turn.turn) ?? [];
    waiting.push(...next.map((child) => [child, depth + (next.length > 1 ? 1 : 0)]).reverse());
  }
}

// ---- The tooltip of a token ----

const tip = byId("tip");
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→");

function showTip(token) {
  const { sheet, turn, first } = blocks.get(token.parentElement);
  const place = first + [...token.parentElement.children].indexOf(token);
  const entries = [["turn", turn.turn]];
  if (turn.ids) entries.unshift(["token id", turn.ids[place]]);
  for (const [key, values] of sheet.episode.values) {
    const { name = key, unit } = columns.get(key) ?? {};
    const value = readable(values[turn.start + place]);
    if (key !== "turn") entries.push([name, unit && value !== "none" ? `${value} ${unit}` : value]);
  }
  tip.replaceChildren(make("code", "", visible(turn.pieces[place])),
    make("dl", "", ...entries.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", String(value))])));
  tip.hidden = false;
  token.setAttribute("aria-describedby", "tip");
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const below = box.bottom + tip.offsetHeight + 12 < innerHeight;
  tip.style.top = `${below ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
}

function hideTip() {
  tip.hidden = true;
}

// ---- What the reader does ----

const KEYS = {
  j: ["next episode", () => step(1)], k: ["previous episode", () => step(-1)],
  "/": ["search", () => focusSearch()],
  n: ["next hit", () => jumpToHit(1)], N: ["previous hit", () => jumpToHit(-1)],
  c: ["next colour", () => nextColor()],
  g: ["group side by side, and back", () => toggleView("group")], t: ["tree of turns, and back", () => toggleView("tree")],
  d: ["dark, light or automatic", () => nextTheme()], "?": ["these keys", () => byId("help").showModal()],
  Escape: ["leave search, close", () => leave()],
};

function focusSearch() {
  showEpisodes(true);
  document.querySelector("[name=search]").select();
}

function nextColor() {
  const names = ["none", ...columns.keys()];
  return go({ color: names[(names.indexOf(state.color) + 1) % names.length] }, false);
}

function toggleView(view) {
  if (state.view === view) return go({ view: "dialogue" });
  return document.querySelector(`[data-view=${view}]`).disabled ? null : go({ view, turn: "" });
}

function nextTheme() {
  const themes = ["auto", "light", "dark"];
  const { dataset } = document.documentElement;
  dataset.theme = themes[(themes.indexOf(dataset.theme) + 1) % 3];
  nameTheme();
}

function nameTheme() {
  byId("theme-button").textContent = { auto: "Automatic", light: "Light", dark: "Dark" }[document.documentElement.dataset.theme];
}

function leave() {
  document.activeElement.blur();
  hideTip();
  showEpisodes(false);
}

/** Opens or closes the list where the window is too narrow for it to stay. */
function showEpisodes(open) {
  byId("episodes").classList.toggle("open", open);
  byId("episodes-button").setAttribute("aria-expanded", open);
  drawRows();
}

function onKey(event) {
  const typing = event.target.matches("input, select, textarea") && event.key !== "Escape";
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const arrow = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  const reply = event.target.closest(".reply");
  if (reply && arrow) moveToken(event.target, reply, arrow);
  else if (event.target === list && arrow) step(arrow);
  else if (KEYS[event.key]) KEYS[event.key][1]();
  else return;
  event.preventDefault();
}

function moveToken(target, reply, by) {
  const element = target.matches(".token") ? target.parentElement : reply.querySelector(".block");
  const { sheet, turn, first } = blocks.get(element);
  const place = target.matches(".token") ? [...element.children].indexOf(target) + by : 0;
  sheet.focusToken(turn.start + first + place);
}

/** Waits until the reader stops typing. */
function onInput({ target }) {
  clearTimeout(onInput.timer);
  const wait = target.matches("select") ? 0 : 200;
  onInput.timer = setTimeout(() => go({ [target.name]: target.value }, false), wait);
}

function begin() {
  const tokens = index.episodes.reduce((sum, record) => sum + record.tokens, 0);
  byId("about").textContent = [count(records.size, "episode"), count(tokens, "sampled token"),
    index.made, ...index.sources].join(" · ");
  const stops = Map.groupBy(index.episodes.filter(outcome), outcome);
  const options = [...stops].map(([stop, { length }]) => [stop, `${stop} (${length})`]);
  for (const [value, text] of options) document.querySelector("[name=stop]").append(new Option(text, value));
  for (const [key, { name }] of columns) document.querySelector("[name=color]").append(new Option(name, key));
  byId("keys").append(...Object.entries(KEYS).flatMap(([key, [does]]) => [make("dt", "", key), make("dd", "", does)]));
  drawHealth();
  for (const field of document.querySelectorAll("aside [name], main [name]")) field.oninput = onInput;
  for (const button of document.querySelectorAll("[data-view]")) {
    button.onclick = () => go({ view: button.dataset.view, turn: "" });
  }
  byId("theme-button").onclick = nextTheme;
  byId("help-button").onclick = () => byId("help").showModal();
  byId("episodes-button").onclick = () => showEpisodes(!byId("episodes").classList.contains("open"));
  byId("clear-button").onclick = () => go(Object.fromEntries(FILTERS.map((key) => [key, ""])), false);
  list.onscroll = drawRows;
  addEventListener("resize", drawRows);
  addEventListener("hashchange", readAddress);
  addEventListener("keydown", onKey);
  for (const event of ["mouseover", "focusin"]) {
    main.addEventListener(event, ({ target }) => (target.matches(".token") ? showTip(target) : hideTip()));
  }
  main.addEventListener("scroll", hideTip, true);
  document.documentElement.dataset.theme = "auto";
  nameTheme();
  readAddress();
}

function drawHealth() {
  const health = byId("health");
  health.hidden = !index.health.length;
  for (const { level, title, text, link } of index.health) {
    const more = /^(#|https?:)/.test(link ?? "") ? make("a", "", "Show") : null;
    if (more) more.href = link;
    health.append(make("p", level, make("strong", "", title), " ", text, " ", more));
  }
}

begin();

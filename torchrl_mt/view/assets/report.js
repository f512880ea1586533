"use strict";
/* The page of a report of episodes. What it shows is written in the address after "#"; `show` draws that.
   Texts of episodes enter the page as text nodes, never as markup. */

const ROW_HEIGHT = 52; // pixels, as in report.css
const BLOCK_PIECES = { dialogue: 200, group: 50 }; // tokens, or stretches of text between hits, in a block
const PAGE_NODES = 4700; // beyond which no block near the viewport is filled: the page stays below 5,000
const FOLD_CHARACTERS = 1200; // longer reasoning is folded

const byId = (id) => document.getElementById(id);
const [main, list, page, tip] = [document.querySelector("main"), byId("list"), byId("page"), byId("tip")];
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const pretty = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
const readable = (number) => (Number.isNaN(number) ? "none" : String(Number(number.toPrecision(5))));
const joined = (texts) => texts.filter(Boolean).join(" · ");
const after = (item, items) => items[(items.indexOf(item) + 1) % items.length];

/** An element with this class, or these properties, and these children; strings become text. */
function make(tag, given, ...children) {
  const properties = typeof given === "string" ? { className: given } : given;
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- Reading the data ----
/** The text of a data script, which leaves the page: browsers keep long text in many nodes. */
const take = (id) => byId(id).parentNode.removeChild(byId(id)).textContent.trim();
const index = JSON.parse(take("index"));
const columns = new Map(index.columns.map((column) => [column.key, column]));
const parts = take("parts").split("\n").map((line) => line.split(" ")); // of each episode: texts, values
const images = new Map(take("images").split("\n").map((line) => [line.split(" ", 1)[0], line]));
const { bases, vocabulary } = index;
const records = new Map(index.episodes.map(({ group, ...record }, line) => [record.key, {
  ...record, line, parts: parts[line], number: record.id - bases.episode,
  group: group === null ? null : group - bases.group,
  name: joined(group === null ? [`Episode ${record.id - bases.episode}`]
    : [`Group ${group - bases.group}`, record.sample !== null && `sample ${record.sample}`]),
  outcome: record.rejected ? `rejected: ${record.rejected}` : record.stop,
  size: joined([count(record.turns, "turn"), count(record.tokens, "token")]),
  weights: record.head === record.tail ? record.head : `${record.head}–${record.tail}`,
}]));

/** A response whose body is what was compressed. */
function inflate(base64) {
  const bytes = new Uint8Array(atob(base64).split("").map((character) => character.charCodeAt(0)));
  const { readable: output, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter();
  Promise.all([writer.write(bytes), writer.close()]).catch(() => {}); // who reads the response hears of it
  return new Response(output);
}

/** The values of each column. They are stored byte by byte: all first bytes, then all second ones... */
function unshuffle(bytes, keys, length) {
  return new Map(keys.map((key, number) => {
    const column = new Uint8Array(4 * length);
    for (let k = 0; k < 4 * length; k++) column[k] = bytes[(4 * number + (k & 3)) * length + (k >> 2)];
    return [key, new Float32Array(column.buffer)];
  }));
}

/** The turns of an episode. Most tokens have their usual text, which their number tells. */
async function readTurns(record) {
  const content = await inflate(record.parts[0]).json();
  for (const turn of content.turns) {
    turn.pieces ??= turn.ids.map((id, k) => turn.others[k] ?? vocabulary[id]);
  }
  return content;
}

async function readEpisode(record) {
  const content = await readTurns(record);
  let length = 0;
  for (const turn of content.turns) {
    turn.start = length; // the number of its first token in the episode
    length += turn.pieces.length;
  }
  const bytes = new Uint8Array(await inflate(record.parts[1]).arrayBuffer());
  const values = unshuffle(bytes, content.columns, length);
  return { ...content, record, length, values, texts: textsOf(content.turns) };
}

/** The texts of a message, each with its kind, in the order in which they are shown. */
function textsOfMessage(said) {
  const calls = (said?.tool_calls ?? []).map((call) => ["call", `${call.name}\n${pretty(call.arguments)}`]);
  return [["reasoning", said?.reasoning], ["content", said?.content], ...calls].filter(([, text]) => text);
}

/** All texts of an episode, in the order in which the dialogue shows them: what the search goes through. */
function textsOf(turns) {
  return turns.flatMap(({ given, pieces, said }) => {
    const reply = pieces.length ? [["tokens", pieces.join("")]] : textsOfMessage(said);
    return [...given.flatMap(textsOfMessage), ...reply].map(([, text]) => text);
  });
}

// ---- The state, kept in the address ----
const FILTERS = { min: "", max: "", oldest: "", newest: "", group: "", stop: "", use: "" };
const DEFAULTS = {
  episode: "", turn: "", view: "dialogue", color: index.columns[0]?.key ?? "none",
  search: "", sort: "id", order: "up", ...FILTERS,
};
const FIELDS = document.querySelectorAll("aside [name], main [name]"); // named as in the state
let state = DEFAULTS;

function readAddress() {
  const entries = [...new URLSearchParams(location.hash.slice(1))].filter(([key]) => key in DEFAULTS);
  state = { ...DEFAULTS, ...Object.fromEntries(entries) };
  return show();
}

function go(changes, remember = true) {
  state = { ...state, ...changes };
  const set = Object.entries(state).filter(([key, value]) => value !== DEFAULTS[key]);
  history[remember ? "pushState" : "replaceState"](null, "", `#${new URLSearchParams(set)}`);
  return show();
}

function show() {
  for (const field of FIELDS) if (field.value !== state[field.name]) field.value = state[field.name];
  if (found.query !== state.search) countHits(state.search);
  drawList();
  return drawMain();
}

// ---- The list ----
const shortReward = (reward) => (reward === null ? "–" : reward.toFixed(2).replace("-", "−"));
const least = index.episodes.reduce((reward, record) => Math.min(reward, record.reward), 0);
const greatest = index.episodes.reduce((reward, record) => Math.max(reward, record.reward), least + 1e-9);
let chosen = []; // records that the filters let through, in order

/** Whether the range low..high, if known, meets the bounds, which are empty where nothing is asked. */
function meets(low, high, from, to) {
  if (low === null) return from + to === "";
  return (from === "" || high >= Number(from)) && (to === "" || low <= Number(to));
}

function passes(record) {
  const uses = { "": true, kept: !record.rejected, rejected: record.rejected, evaluation: record.eval };
  return meets(record.reward, record.reward, state.min, state.max)
    && meets(record.head, record.tail, state.oldest, state.newest)
    && (state.group === "" || String(record.group) === state.group)
    && (state.stop === "" || record.outcome === state.stop)
    && uses[state.use]
    && (!found.done || !found.query || found.counts.has(record));
}

/** Orders numbers and words; what is not known comes last. */
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "string" ? a.localeCompare(b) : a - b);
}

function drawList() {
  const sign = state.order === "down" ? -1 : 1;
  chosen = [...records.values()].filter(passes).sort((a, b) => compare(a[state.sort], b[state.sort], sign));
  byId("count").textContent = chosen.length === records.size ? count(records.size, "episode")
    : `${chosen.length.toLocaleString("en")} of ${count(records.size, "episode")}`;
  drawRows();
}

/** Makes the rows that are in sight; an empty element keeps the list as high as all rows. */
function drawRows() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 3);
  const rows = chosen.slice(first, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 6);
  const space = make("div", { style: `height: ${chosen.length * ROW_HEIGHT}px` });
  list.replaceChildren(space, ...rows.map((record, number) => makeRow(record, first + number)));
  list.setAttribute("aria-activedescendant", `row-${state.episode}`);
}

function makeRow(record, place) {
  const share = (100 * (record.reward - least)) / (greatest - least);
  const hits = found.counts.get(record);
  const details = joined([hits && count(hits, "hit"), record.outcome, record.size]);
  return make("div", {
    className: record.rejected ? "row rejected" : "row", style: `top: ${place * ROW_HEIGHT}px`,
    role: "option", id: `row-${record.key}`, ariaSelected: record.key === state.episode,
    onclick: () => openEpisode(record),
  }, make("span", { className: "reward", style: `--share: ${share}%` }, shortReward(record.reward)),
  make("span", "name", record.name), make("span", "details quiet", details),
  make("span", "quiet", record.head === null ? "" : `weights ${record.weights}`));
}

const openEpisode = (record) => go({ episode: record.key, turn: "" });
function step(by) {
  const place = chosen.indexOf(records.get(state.episode));
  const next = chosen[place < 0 ? 0 : place + by];
  return next && openEpisode(next);
}

// ---- Search ----
let found = { query: "", counts: new Map(), done: true };
let currentHit = -1; // its number in the episode; -1 before the first jump

function findHits(texts, query) {
  if (!query) return [];
  const pattern = new RegExp(query.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi");
  const hits = texts.flatMap((text, segment) =>
    Array.from(text.matchAll(pattern), ({ index: from }) => ({ segment, from, to: from + query.length })));
  return hits.map((hit, number) => ({ ...hit, number }));
}

/** Counts the hits in every episode, a few episodes at a time: the page answers meanwhile. */
async function countHits(query) {
  const mine = (found = { query, counts: new Map(), done: !query });
  let total = 0;
  for (const record of query ? records.values() : []) {
    record.texts ??= await readTurns(record).then(({ turns }) => textsOf(turns), () => []);
    const { length } = findHits(record.texts, query);
    if (length) mine.counts.set(record, length);
    total += length;
    if (found !== mine) return;
    if (record.line % 25) continue;
    byId("found").textContent = `Searching, ${Math.round((100 * record.line) / records.size)} %`;
    await new Promise((resolve) => setTimeout(resolve));
  }
  mine.done = true;
  byId("found").textContent = query && `${count(total, "hit")} in ${count(mine.counts.size, "episode")}`;
  drawList();
}

/** Goes to the next hit (or, with -1, to the one before); after the last one, to the next episode. */
async function jumpToHit(by) {
  if (!state.search) return;
  if (state.view !== "dialogue") await go({ view: "dialogue" });
  const inside = sheets[0].hits[currentHit + by];
  if (!inside) await step(by);
  const { hits } = sheets[0];
  currentHit = inside ? currentHit + by : by > 0 ? 0 : hits.length - 1;
  fillNearest(true);
  const element = allBlocks().find((one) => blocks.get(one).hits.includes(hits[currentHit]));
  if (!element) return;
  element.closest("details")?.setAttribute("open", "");
  setBlock(element, true);
  element.querySelector(".current").scrollIntoView({ block: "center" });
  byId("found").textContent = `Hit ${currentHit + 1} of ${hits.length} in this episode`;
}

// ---- Blocks: text that is one node far from the viewport, and many elements near it ----
const blocks = new WeakMap(); // by their element: {sheet, turn, first, pieces, text, hits, offset, filled}
const allBlocks = () => [...page.querySelectorAll(".block")];
const near = new Set();
const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) near[isIntersecting ? "add" : "delete"](target);
  fillNearest();
}, { scrollMargin: "300px 0px" });

/** Fills the blocks near the viewport, those nearest its middle first, as far as PAGE_NODES goes. */
function fillNearest(again = false) {
  const distance = (element) => Math.abs(element.getBoundingClientRect().top - innerHeight / 2);
  let nodes = 2 * document.querySelectorAll(":not(.token)").length; // elements, and about as many texts
  const wanted = allBlocks().filter((element) => near.has(element)).sort((a, b) => distance(a) - distance(b))
    .filter((element) => (nodes += 2 * blocks.get(element).pieces.length) <= PAGE_NODES);
  for (const element of allBlocks()) setBlock(element, wanted.includes(element), again);
}

/** Gives a block its elements (again, when their looks have changed), or makes it one text. */
function setBlock(element, filled, again = false) {
  const block = blocks.get(element);
  if (filled === block.filled && !again) return;
  block.filled = filled;
  element.replaceChildren(...(filled ? block.sheet.elementsOf(block) : [block.text]));
}

// ---- Colours ----
/** A colour of report.css, the stronger the nearer the share is to 1. */
const tint = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(60 * share)}%, transparent)`;

const centreOf = (key) => (key === "ratio" ? 1 : 0);

/** The background of a token with this value. */
function shade({ kind, low, high, key }, value) {
  if (Number.isNaN(value)) return "transparent";
  const share = Math.min(1, Math.max(0, (value - low) / (high - low || 1)));
  if (kind === "low") return tint("warm", 1 - share);
  if (kind === "high") return tint("warm", share);
  if (kind === "steps") return `color-mix(in oklab, var(--late) ${Math.round(100 * share)}%, var(--early))`;
  const centre = centreOf(key);
  const reach = Math.max(Math.abs(low - centre), Math.abs(high - centre)) || 1;
  return tint(value < centre ? "minus" : "plus", Math.min(1, Math.abs(value - centre) / reach));
}

/** Goes to the token of this episode with the strongest colour. */
async function jumpToExtreme() {
  const column = columns.get(state.color);
  const values = column && shown.values.get(column.key);
  if (!values) return;
  if (state.view !== "dialogue") await go({ view: "dialogue" });
  const { kind, key } = column;
  const marks = { low: (value) => -value, high: (value) => value, steps: (value) => value };
  const mark = marks[kind] ?? ((value) => Math.abs(value - centreOf(key)));
  const isMore = (value, best) => Number.isNaN(best) || mark(value) > mark(best);
  const most = values.reduce((best, value, k) => (isMore(value, values[best]) ? k : best), 0);
  const holds = ({ first, pieces }) => first <= most && most < first + pieces.length;
  const block = allBlocks().find((one) => holds(blocks.get(one)));
  if (!block) return;
  block.closest("details")?.setAttribute("open", "");
  setBlock(block, true);
  const token = block.children[most - blocks.get(block).first];
  token.scrollIntoView({ block: "center" });
  token.focus();
}

function drawLegend() {
  const column = columns.get(state.color);
  const known = shown.values.has(state.color);
  if (!column || !known) return byId("legend").replaceChildren(column ? "not recorded in this episode" : "");
  const { low, high, unit } = column;
  const stops = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((k) => shade(column, low + ((high - low) * k) / 8));
  const ramp = make("span", { className: "ramp", style: `background: linear-gradient(90deg, ${stops})` });
  byId("legend").replaceChildren(readable(low), ramp, `${readable(high)} ${unit ?? ""}`);
}

// ---- One episode laid out as text ----
let sheets = []; // those on the page

/** The turns of one episode as elements. Texts are made in the order of `textsOf`: so each finds its hits. */
class Sheet {
  /** partings: the tokens at which other episodes part from this one; before the first, all are alike. */
  constructor(episode, blockPieces, partings = []) {
    Object.assign(this, { episode, blockPieces, partings, common: Math.min(...partings, episode.length) });
    this.hits = findHits(episode.texts, state.search);
  }

  turns() {
    const { turns } = this.episode;
    this.segment = -1; // the number of the text that is made now
    return turns.map((turn, place) => this.turn(turn, turns[place - 1]?.turn ?? -1, isTree(turns)));
  }

  turn(turn, before, withRow) {
    const origin = turn.parent < 0 ? "starts anew" : `goes on from turn ${turn.parent}`;
    const notes = joined([withRow && `row ${turn.row}`, turn.parent !== before && origin]);
    const address = new URLSearchParams({ episode: this.episode.record.key, turn: turn.turn });
    const reward = turn.reward !== null && `reward ${readable(turn.reward)}`;
    const section = make("section", "turn",
      make("h3", "", make("a", { href: `#${address}` }, `Turn ${turn.turn}`), make("span", "quiet", notes)),
      ...turn.given.map((message) => makeMessage(message.role, message.name, this.message(message))),
      makeMessage(turn.said?.role ?? "assistant", "", this.reply(turn)),
      make("p", "ends quiet", joined([reward, turn.finish && `finish reason: ${turn.finish}`])));
    section.dataset.turn = turn.turn;
    return section;
  }

  /** What a message says: reasoning (folded if long), text, tool calls and images. */
  message(message) {
    const texts = textsOfMessage(message).map(([kind, text]) => {
      this.segment += 1;
      const hits = this.hits.filter(({ segment }) => segment === this.segment);
      const cuts = [0, ...hits.flatMap(({ from, to }) => [from, to]), text.length];
      const element = this.flow(kind, cuts.slice(1).map((cut, k) => text.slice(cuts[k], cut)));
      const long = kind === "reasoning" && text.length > FOLD_CHARACTERS;
      return long ? makeFold("Reasoning", element) : element;
    });
    return make("div", "body", ...texts, ...(message?.images ?? []).map(makeImage));
  }

  /** The sampled tokens; beneath them the tool calls that were read in them. */
  reply(turn) {
    if (!turn.pieces.length) return this.message(turn.said);
    this.segment += 1;
    const [from, to] = longReasoning(turn);
    const tokens = (first, last) => this.flow("tokens", turn.pieces.slice(first, last), turn, first);
    const fold = to ? makeFold(`Reasoning, ${count(to - from, "token")}`, tokens(from, to)) : "";
    const calls = textsOfMessage(turn.said).filter(([kind]) => kind === "call");
    const ariaLabel = `Tokens of turn ${turn.turn}: go through them with the arrow keys`;
    return make("div", { className: "body reply", tabIndex: 0, role: "group", ariaLabel },
      tokens(0, from), fold, tokens(to), ...calls.map(([kind, text]) => make("div", kind, text)));
  }

  /** Text in blocks of pieces: tokens of a turn, or what the hits cut the text of a message into. */
  flow(className, pieces, turn = null, skipped = 0) {
    const element = make("div", className);
    let offset = turn ? turn.pieces.slice(0, skipped).join("").length : 0;
    for (let k = 0; k < pieces.length; k += this.blockPieces) {
      const own = pieces.slice(k, k + this.blockPieces);
      const text = own.join("");
      const hits = this.hits.filter(({ segment, from, to }) =>
        segment === this.segment && from < offset + text.length && to > offset);
      const block = make("span", "block", text);
      const first = turn?.start + skipped + k;
      blocks.set(block, { sheet: this, turn, first, pieces: own, text, hits, offset, filled: false });
      observer.observe(block);
      element.append(block);
      offset += text.length;
    }
    return element;
  }

  elementsOf({ turn, first, pieces, hits, offset }) {
    const column = turn && this.episode.values.has(state.color) && columns.get(state.color);
    const values = column && this.episode.values.get(column.key);
    return pieces.map((piece, k) => {
      const here = offset;
      offset += piece.length;
      const hit = hits.find(({ from, to }) => from < offset && to > here);
      const names = {
        token: turn, special: turn && /^<[|\w/].*>$/.test(piece), newline: turn && /^\s*\n/.test(piece), hit,
        current: hit?.number === currentHit, common: this.partings.length && turn && first + k < this.common,
        parting: turn && this.partings.includes(first + k),
      };
      const className = Object.keys(names).filter((name) => names[name]).join(" ");
      const element = make("span", turn ? { className, tabIndex: -1 } : className, piece);
      if (column) element.style.backgroundColor = shade(column, values[first + k]);
      return element;
    });
  }
}

/** The tokens of a reasoning that is to be folded: from, to; or 0, 0. */
function longReasoning({ said, pieces }) {
  const reasoning = said?.reasoning?.trim() ?? "";
  const start = pieces.join("").indexOf(reasoning);
  if (reasoning.length <= FOLD_CHARACTERS || start < 0) return [0, 0];
  let end = 0;
  const ends = pieces.map((piece) => (end += piece.length));
  return [ends.findIndex((at) => at > start), ends.findIndex((at) => at >= start + reasoning.length) + 1];
}

const makeFold = (title, content) => make("details", "", make("summary", "", title), content);
const makeMessage = (role, name, body) =>
  make("div", role === "tool" ? "message tool" : "message", make("span", "role", joined([role, name])), body);

function makeImage(key) {
  const [, type, data] = (images.get(key) ?? "").split(" ");
  if (!type?.startsWith("image/")) return make("p", "quiet", `Image ${key} is not in this report.`);
  return make("img", { src: `data:${type};base64,${data}`, alt: `Image ${key}` });
}

// ---- The episode and its three views ----
let shown = null; // the episode on the page
let drawn = []; // what was asked for when the page was drawn
let drawings = 0; // several may be under way: the last one counts

async function drawMain() {
  const rewarded = [...records.values()].filter(({ reward }) => reward !== null);
  rewarded.sort((one, other) => one.reward - other.reward);
  const named = { worst: rewarded[0], best: rewarded.at(-1) }; // other pages link to these
  const record = records.get(state.episode) ?? named[state.episode] ?? chosen[0] ?? [...records.values()][0];
  if (!record) return page.replaceChildren("This report has no episodes.");
  state.episode = record.key;
  const wanted = [record.key, state.view, state.search, state.turn];
  const mine = ++drawings;
  if (String(drawn) === String(wanted)) fillNearest(true);
  else {
    const group = state.view === "group" && record.group !== null ? groupOf(record) : [record];
    const episodes = await Promise.all(group.map(readEpisode)).catch((error) => error);
    if (mine !== drawings) return;
    if (episodes instanceof Error) return page.replaceChildren(`This is not readable: ${episodes.message}`);
    drawPage(record, episodes);
    if (drawn[0] !== record.key) showList(false);
    if (drawn.length && drawn[0] !== record.key) byId("head").scrollIntoView();
    page.querySelector(`[data-turn="${CSS.escape(state.turn)}"]`)?.scrollIntoView();
    drawn = wanted;
  }
  drawLegend();
}

function drawPage(record, episodes) {
  shown = episodes.find((episode) => episode.record === record);
  const views = { dialogue: drawDialogue };
  if (record.group !== null && groupOf(record).length > 1) views.group = drawGroup;
  if (isTree(shown.turns)) views.tree = drawTree;
  const view = state.view in views ? state.view : "dialogue";
  for (const button of byId("views").children) {
    button.disabled = !(button.value in views);
    button.ariaPressed = button.value === view;
  }
  drawHead(shown);
  const top = chosen.indexOf(record) * ROW_HEIGHT; // the list scrolls as little as shows the episode
  list.scrollTop = Math.min(top, Math.max(list.scrollTop, top + ROW_HEIGHT - list.clientHeight));
  drawRows();
  currentHit = -1;
  page.className = view;
  page.replaceChildren();
  views[view](episodes);
}

const makeFacts = (entries) => make("dl", "facts", ...Object.entries(entries)
  .filter(([, value]) => value !== null)
  .map(([key, value]) => make("div", "", make("dt", "", key), make("dd", "", pretty(value)))));

function drawHead({ record, facts }) {
  const name = make("span", "quiet", record.group === null ? "" : record.name);
  byId("head").replaceChildren(make("h2", { title: record.id }, `Episode ${record.number} `, name), makeFacts({
    Reward: record.reward === null ? null : readable(record.reward), Turns: record.turns,
    "Sampled tokens": record.tokens.toLocaleString("en"), Length: record.length.toLocaleString("en"),
    "Stop reason": record.stop, Rejected: record.rejected, Weights: record.weights,
    Use: record.eval ? "evaluation" : null, Task: record.task,
    Source: index.sources.length > 1 ? index.sources[record.source] : null,
  }), Object.keys(facts).length ? makeFold("More facts", makeFacts(facts)) : "");
}

function drawDialogue(episodes) {
  sheets = episodes.map((episode) => new Sheet(episode, BLOCK_PIECES.dialogue));
  page.append(...sheets[0].turns());
}

const groupOf = (record) => [...records.values()]
  .filter(({ group, source }) => group === record.group && source === record.source)
  .sort((a, b) => compare(a.reward, b.reward, -1));

/** The first token at which an episode differs from another, or that follows something else than there. */
function parting(one, other) {
  for (const [place, turn] of one.turns.entries()) {
    const twin = other.turns[place];
    if (JSON.stringify(turn.given) !== JSON.stringify(twin?.given)) return turn.start;
    const [own, theirs] = turn.ids && twin.ids ? [turn.ids, twin.ids] : [turn.pieces, twin.pieces];
    const at = (own.length > theirs.length ? own : theirs).findIndex((_, k) => own[k] !== theirs[k]);
    if (at >= 0) return turn.start + at;
  }
  return one.length;
}

/** The members of a group side by side, each compared with the one chosen. Columns are full only in sight. */
function drawGroup(episodes) {
  const inSight = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting: full } of entries) {
      target.replaceChildren(target.firstChild, ...(full ? sheets[target.dataset.place].turns() : []));
    }
  });
  sheets = episodes.map((episode, place) => {
    const others = episode === shown ? episodes.filter((other) => other !== shown) : [shown];
    const { key, name, reward, outcome, size } = episode.record;
    const button = make("button", { className: "link", onclick: () => go({ episode: key }) }, name);
    const partings = others.map((other) => parting(episode, other));
    const note = episode === shown ? "compared with the others" : `${count(partings[0], "token")} in common`;
    const column = make("div", "column", make("header", episode === shown ? "chosen" : "",
      make("strong", "", shortReward(reward)), button,
      make("p", "quiet", joined([outcome, size])), make("p", "quiet", note)));
    column.dataset.place = place;
    page.append(column);
    inSight.observe(column);
    return new Sheet(episode, BLOCK_PIECES.group, partings);
  });
}

const isTree = (turns) =>
  turns.some(({ parent, row }, k) => parent !== (turns[k - 1]?.turn ?? -1) || row !== turns[0].row);

/** The turns as a tree, indented where several go on from the same turn. */
function drawTree() {
  sheets = [];
  const children = Map.groupBy(shown.turns, ({ parent }) => parent);
  const draw = (turn, depth, before) => {
    const words = turn.pieces.length ? turn.pieces.slice(0, 60).join("") : turn.said?.content ?? "";
    const row = joined([`row ${turn.row}`, turn.parent !== before && `from turn ${turn.parent}`]);
    const texts = [row, turn.reward === null ? "" : `reward ${readable(turn.reward)}`];
    const onclick = () => go({ view: "dialogue", turn: String(turn.turn) });
    page.append(make("button", { className: "branch", style: `--depth: ${depth}`, onclick },
      make("strong", "", `Turn ${turn.turn}`), ...texts.map((text) => make("span", "quiet", text)),
      make("span", "words", words.slice(0, 200))));
    const next = children.get(turn.turn) ?? [];
    next.forEach((child, k) => draw(child, depth + (next.length > 1), k ? null : turn.turn));
  };
  for (const root of children.get(-1) ?? []) draw(root, 0, -1);
}

// ---- The tooltip of a token ----
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→");

/** Shows the tooltip of a token; hides it if this is none. */
function showTip(token) {
  tip.hidden = !token.matches(".token");
  if (tip.hidden) return;
  const { sheet, turn, first } = blocks.get(token.parentElement);
  const here = first + [...token.parentElement.children].indexOf(token);
  const entries = [["token id", turn.ids?.[here - turn.start] ?? "not known"], ["turn", turn.turn]];
  for (const [key, values] of sheet.episode.values) {
    const { name = key, unit } = columns.get(key) ?? {};
    const value = readable(values[here]);
    if (key !== "turn") entries.push([name, value === "none" ? value : `${value} ${unit ?? ""}`]);
  }
  tip.replaceChildren(make("code", "", visible(token.textContent)),
    make("dl", "", ...entries.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)])));
  token.setAttribute("aria-describedby", "tip");
  const { left, top, bottom } = token.getClientRects()[0];
  tip.style.top = `${bottom + tip.offsetHeight < innerHeight ? bottom + 6 : top - tip.offsetHeight - 6}px`;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - tip.offsetWidth - 8))}px`;
}

// ---- What the reader does ----
const KEYS = {
  j: ["next episode", () => step(1)],
  k: ["previous episode", () => step(-1)],
  "/": ["search", () => [showList(true), FIELDS[0].select()]],
  n: ["next hit", () => jumpToHit(1)],
  N: ["previous hit", () => jumpToHit(-1)],
  c: ["next colour", () => go({ color: after(state.color, ["none", ...columns.keys()]) }, false)],
  m: ["the token of this episode with the strongest colour", jumpToExtreme],
  g: ["the group side by side, and back", () => toggleView("group")],
  t: ["the turns as a tree, and back", () => toggleView("tree")],
  d: ["theme: automatic, light, dark", nextTheme],
  "?": ["these keys", () => byId("help").showModal()],
  Escape: ["leave the search, close", () => [showList(false), document.activeElement.blur()]],
};
const toggleView = (view) => go({ view: state.view === view ? "dialogue" : view, turn: "" });
function nextTheme() {
  const { dataset } = document.documentElement;
  dataset.theme = after(dataset.theme, ["auto", "light", "dark"]);
  byId("theme").textContent = `Theme: ${dataset.theme}`;
}

/** Opens or closes the list where the window is too narrow for it to stay. */
function showList(open) {
  byId("episodes").classList.toggle("open", open);
  byId("open-list").ariaExpanded = open;
  tip.hidden = true;
  drawRows();
}

function onKey(event) {
  const { target, key } = event;
  const typing = target.matches("input, select") && key !== "Escape";
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const arrow = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[key];
  const tokens = [...(target.closest(".reply")?.querySelectorAll(".token") ?? [])];
  if (arrow && tokens.length) tokens[tokens.indexOf(target) + arrow]?.focus();
  else if (arrow && target === list) step(arrow);
  else if (key in KEYS) KEYS[key][1]();
  else return;
  event.preventDefault();
}

let typed; // the timer that waits until the reader stops typing
function onInput({ name, value, type }) {
  clearTimeout(typed);
  typed = setTimeout(() => go({ [name]: value }, false), type === "select-one" ? 0 : 200);
}

function drawFrame() {
  const tokens = index.episodes.reduce((sum, record) => sum + record.tokens, 0);
  const sizes = [count(records.size, "episode"), count(tokens, "sampled token")];
  byId("about").textContent = joined([...sizes, index.made, ...index.sources]);
  const stops = Map.groupBy([...records.values()].filter(({ outcome }) => outcome), ({ outcome }) => outcome);
  for (const [stop, { length }] of stops) byId("stop").append(new Option(`${stop} (${length})`, stop));
  for (const [key, { name }] of columns) byId("color").append(new Option(name, key));
  const keys = Object.entries(KEYS).flatMap(([key, [does]]) => [make("dt", "", key), make("dd", "", does)]);
  byId("keys").append(...keys);
  for (const { level, title, text, link } of index.health) {
    const more = /^(#|https?:)/.test(link ?? "") ? make("a", { href: link }, "Show") : "";
    byId("health").append(make("p", level, make("strong", "", title), ` ${text} `, more));
  }
}

main.addEventListener("focusin", ({ target }) => showTip(target));
main.addEventListener("scroll", () => showTip(document.activeElement), true);
drawFrame();
readAddress();

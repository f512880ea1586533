"use strict";
const opened = new Set();
const DASHES = ["", "6 3", "2 3", "8 3 2 3"];

// Text from the run only ever becomes text nodes: never markup.
function make(tag, facts = {}, ...children) {
  const e = document.createElement(tag);
  for (const [key, value] of Object.entries(facts)) e.setAttribute(key, value);
  e.append(...children.filter((child) => child !== null));
  return e;
}
function draw(tag, facts, text = "") {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(facts)) e.setAttribute(key, value);
  e.textContent = text;
  return e;
}
function number(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
}
function folded(title, fill) { // what is folded is made when it is opened
  const e = make("details", {}, make("summary", {}, title));
  const open = () => { if (e.open && e.children.length === 1) e.append(fill()); };
  e.addEventListener("toggle", () => { opened[e.open ? "add" : "delete"](title); open(); });
  e.open = opened.has(title);
  open();
  return e;
}
function chart(spec, runs) {
  const W = 340, H = 170, L = 52, R = 8, T = 8, B = 20, many = runs.length > 1;
  const curves = spec.curves.map((c) => ({
    ...c, points: c.points.map(([x, y]) => [x, Number(y)]), // "NaN" and "Infinity" are text in JSON
    colour: `var(--c${(many ? c.run : c.nth) % 8})`, dash: many ? DASHES[c.nth % 4] : "",
  }));
  const points = curves.flatMap((c) => c.points), finite = points.filter((p) => Number.isFinite(p[1]));
  const range = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const figure = make("figure", { class: "chart" }, make("h3", {}, spec.title), make("div", { class: "small" }, spec.unit));
  if (!finite.length) { figure.append(make("p", {}, "No finite number.")); return figure; }
  let [x0, x1] = range(points.map((p) => p[0])), [y0, y1] = range(finite.map((p) => p[1]));
  if (spec.unit.startsWith("share")) y0 = Math.min(0, y0);
  if (x0 === x1) x1 += 1;
  if (y0 === y1) { const room = Math.abs(y0) / 10 || 1; y0 -= y0 ? room : 0; y1 += room; }
  const X = (x) => L + (W - L - R) * (x - x0) / (x1 - x0), Y = (y) => H - B - (H - T - B) * (y - y0) / (y1 - y0);
  const svg = draw("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": spec.title });
  for (const y of [y0, (y0 + y1) / 2, y1]) {
    svg.append(draw("line", { x1: L, x2: W - R, y1: Y(y), y2: Y(y), stroke: "var(--line)" }));
    svg.append(draw("text", { x: L - 4, y: Y(y) + 3, "text-anchor": "end" }, number(y)));
  }
  svg.append(draw("text", { x: L, y: H - 5 }, `step ${x0}`), draw("text", { x: W - R, y: H - 5, "text-anchor": "end" }, String(x1)));
  for (const c of curves) {
    let d = "", pen = "M";
    for (const [x, y] of c.points) {
      if (Number.isFinite(y)) { d += `${pen}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`; pen = "L"; } else pen = "M";
    }
    if (c.points.length === 1) d += "h2";
    svg.append(draw("path", { d, fill: "none", stroke: c.colour, "stroke-width": 1.5, "stroke-dasharray": c.dash }));
  }
  const mark = draw("line", { y1: T, y2: H - B, stroke: "currentColor", visibility: "hidden" });
  const values = curves.map(() => make("span"));
  const legend = make("div", { class: "legend" }, ...curves.map((c, i) => make("span", { title: c.name },
    make("i", { style: `border-top-style:${c.dash ? "dashed" : "solid"};border-color:${c.colour}` }), c.label, values[i])));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - L) / (W - L - R) * (x1 - x0);
    const near = curves.map((c) => c.points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a), c.points[0]));
    const at = near.reduce((a, b) => (b && (!a || Math.abs(b[0] - x) < Math.abs(a[0] - x)) ? b : a), null)[0];
    for (const name of ["x1", "x2"]) mark.setAttribute(name, X(at));
    mark.setAttribute("visibility", "visible");
    near.forEach((p, i) => { values[i].textContent = p ? ` ${number(p[1])} at ${p[0]}` : ""; });
  });
  svg.append(mark);
  figure.append(svg, legend);
  return figure;
}
function charts(specs, runs) {
  return make("div", { class: "charts" }, ...specs.map((spec) => chart(spec, runs)));
}
function report(run) {
  const bad = run.findings.filter((f) => f.level !== "good"), good = run.findings.filter((f) => f.level === "good");
  const show = (list) => make("div", {}, ...list.map((f) => make("div", { class: `finding ${f.level}` },
    make("b", {}, `${f.title}. `), f.text, make("div", { class: "small" },
      `Steps ${f.steps[0]} to ${f.steps[f.steps.length - 1]}. Rule ${f.rule}.`))));
  const links = run.episodes.map(({ step, href }) => make("span", {}, make("a", { href }, `step ${step}`), " (",
    make("a", { href: `${href}#episode=best` }, "best"), ", ", make("a", { href: `${href}#episode=worst` }, "worst"), ")"));
  return make("section", {}, make("h2", {}, `${run.name}: ${run.steps} steps, ${bad.length ? "what to look at" : "nothing to worry about found"}`),
    show(bad), good.length ? folded(`${run.name}: ${good.length} checks found no fault`, () => show(good)) : null,
    run.unchecked.length ? folded(`${run.name}: ${run.unchecked.length} checks lack their numbers`, () => make("ul", {}, ...run.unchecked.map((text) => make("li", {}, text)))) : null,
    links.length ? make("p", {}, "Episodes: ", ...links.flatMap((link, i) => (i ? [", ", link] : [link]))) : null);
}
function show({ runs, charts: specs }) {
  const kept = specs.filter((spec) => !spec.folded), rest = specs.filter((spec) => spec.folded);
  document.getElementById("page").replaceChildren(make("h1", {}, document.title), ...runs.map(report),
    make("h2", {}, "Curves"), charts(kept, runs), rest.length ? folded(`${rest.length} further numbers`, () => charts(rest, runs)) : "",
    make("h2", {}, "Config and versions"), ...runs.map((run) => folded(run.name, () => make("pre", {}, JSON.stringify(run.facts, null, 1)))));
}
const data = JSON.parse(document.getElementById("data").textContent);
show(data);
if (data.live) {
  let last = "";
  setInterval(async () => {
    try {
      const text = await (await fetch("metrics")).text();
      if (text !== last) { show(JSON.parse(text)); last = text; }
    } catch { /* the server is gone or the run's files are being written: what was there stays */ }
  }, 2000);
}

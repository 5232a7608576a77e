"use strict";
// Drawing. Text only ever becomes text: whatever clients call their cameras, no markup is made of it.

const SVG = "http://www.w3.org/2000/svg";

function node(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const html = (name, attributes, ...children) => node(null, name, attributes, children);
const svg = (name, attributes, ...children) => node(SVG, name, attributes, children);
const byId = (id) => document.getElementById(id);
const known = (value) => typeof value === "number" && Number.isFinite(value);

// Words and numbers

function write(id, text) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text; // unchanged text must not be read out again
}
const STATES = { adapting: "Adapting", paused: "Paused", off: "Adaptation off", following: "Following", alone: "Leader away" };

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
function short(value) {
  if (!known(value)) return "–";
  if (value >= 1e7) return (value / 1e6).toFixed(0) + " M";
  if (value >= 1e6) return (value / 1e6).toFixed(2) + " M";
  return whole.format(value);
}
function figure(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  return size >= 100 ? whole.format(value) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}
function clock(seconds, withSeconds) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (withSeconds) options.second = "2-digit";
  return new Date(1000 * seconds).toLocaleTimeString("en-GB", options);
}
function since(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 2) return "now";
  if (s < 120) return s + " s";
  if (s < 7200) return Math.round(s / 60) + " min";
  return s < 172800 ? Math.round(s / 3600) + " h" : Math.round(s / 86400) + " d";
}
// How far from the training images, in a word that does not need the colour.
function judged(drift) {
  if (!known(drift)) return { kind: "unknown", word: "too few images to say" };
  if (drift <= 1.1) return { kind: "like", word: "as in training" };
  return drift <= 1.4 ? { kind: "shifted", word: "shifted" } : { kind: "far", word: "far off" };
}

// Marks: each kind of event has a shape of its own

function mark(kind, x, y) {
  const at = (d) => svg("path", { d, class: kind, transform: `translate(${x} ${y})` });
  if (kind === "accepted") return svg("circle", { cx: x, cy: y, r: 3.6, class: kind });
  if (kind === "refused") return at("M0-4.6 4.8 4H-4.8Z");
  if (kind === "rolled_back") return at("M-4-4H4V4H-4Z");
  if (kind === "skipped") return at("M0-4V4");
  if (kind === "error") return at("M-4-4 4 4M4-4-4 4");
  return svg("path", { d: "M0-5 5 0 0 5-5 0Z", class: "other", transform: `translate(${x} ${y})` });
}
const badge = (kind) => svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, mark(kind, 7, 7));
const sample = (kind) =>
  svg("svg", { width: 22, height: 10, "aria-hidden": "true" }, svg("path", { d: "M1 5H21", class: "line " + kind }));

// Axes

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) found.push(value);
  return found;
}
function powers(low, high) {
  const found = [];
  for (let p = Math.ceil(Math.log2(low)); p <= Math.floor(Math.log2(high)); p++) found.push(2 ** p);
  const every = Math.ceil(found.length / 6);
  return found.filter((value) => Math.log2(value) % every === 0);
}
function moments(from, to, width) {
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];
  const step = steps.find((s) => ((to - from) / s) * (s < 60 ? 76 : 56) <= width) || 86400;
  const found = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) found.push([t, clock(t, step < 60)]);
  return found;
}

const LEFT = 38;
const RIGHT = 6;

// Lines over time. `scale` "ratio" is logarithmic: twice as far and half as far are the same length.
function lines(host, { from, to, curves, points, height, scale, guide, format, label, timeAxis = true, filled }) {
  const width = Math.max(160, host.clientWidth);
  const bottom = timeAxis ? 22 : 6;
  const values = points.flatMap((p) => curves.map((c) => p[c.key])).filter(known);
  if (!values.length) return empty(host, height);
  const top = Math.max(...values);
  let low = 0;
  let high = top > 0 ? top * 1.12 : 1;
  if (scale === "ratio") {
    low = Math.min(0.5, Math.max(0.05, Math.min(...values) * 0.8));
    high = Math.max(2.2, top * 1.25);
  }
  const place = (v) => (scale === "ratio" ? Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v - low) / (high - low));
  const x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT - RIGHT);
  const y = (v) => 6 + (1 - place(v)) * (height - 6 - bottom);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const marks = scale === "ratio" ? powers(low, high) : ticks(low, high, height > 150 ? 4 : 3);
  if (guide) picture.append(svg("rect", { x: LEFT, y: y(guide.value), width: width - LEFT - RIGHT, height: Math.max(0, y(low) - y(guide.value)), class: "like-source" }));
  for (const value of marks) {
    if (guide && value === guide.value) continue;
    picture.append(svg("path", { d: `M${LEFT} ${y(value)}H${width - RIGHT}`, class: "grid" }));
    picture.append(svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format ? format(value) : figure(value)));
  }
  if (guide) {
    picture.append(svg("path", { d: `M${LEFT} ${y(guide.value)}H${width - RIGHT}`, class: "guide" }));
    picture.append(svg("text", { x: LEFT - 6, y: y(guide.value) + 4, "text-anchor": "end", class: "guide-label" }, guide.label));
  }
  if (timeAxis) timeTicks(picture, from, to, width, height, x);
  for (const curve of curves) {
    for (const run of runs(points, curve.key, from)) {
      const path = "M" + run.map(([t, v]) => `${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join("L");
      if (filled) picture.append(svg("path", { d: `${path}V${y(low)}H${x(run[0][0]).toFixed(1)}Z`, class: "area" }));
      picture.append(svg("path", { d: run.length > 1 ? path : path + "h.1", class: "line " + curve.kind }));
    }
  }
  const inside = points.filter((p) => p.time >= from);
  hover(host, picture, x, height - bottom, inside, (p) =>
    [clock(p.time, true), ...curves.filter((c) => known(p[c.key])).map((c) => `${c.name}: ${figure(p[c.key])}${c.unit || ""}`)].join("\n"));
  host.replaceChildren(picture);
}

// Unbroken stretches: a moment without a number is a gap, not a line across it.
function runs(points, key, from) {
  const found = [[]];
  for (const p of points) {
    if (p.time < from) continue;
    if (known(p[key])) found[found.length - 1].push([p.time, p[key]]);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter((run) => run.length);
}

function timeTicks(picture, from, to, width, height, x) {
  for (const [t, text] of moments(from, to, width - LEFT)) {
    const place = x(t);
    const anchor = place > width - 24 ? "end" : "middle";
    picture.append(svg("path", { d: `M${place} ${height - 22}v4`, class: "hair" }));
    picture.append(svg("text", { x: anchor === "end" ? width : place, y: height - 5, "text-anchor": anchor }, text));
  }
}

const LANES = [["accepted"], ["refused"], ["rolled_back"], ["paused", "resumed", "reset", "saved", "started", "restored", "undone", "stalled", "recovered", "error"]];
const ALWAYS_SHOWN = ["accepted", "refused", "rolled_back", "skipped"];

function timeline(host, { from, to, events, label }) {
  const width = Math.max(160, host.clientWidth);
  const lane = 19;
  const height = LANES.length * lane + 26;
  const x = (t) => LEFT + ((t - from) / (to - from)) * (width - LEFT - RIGHT);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  LANES.forEach((kinds, row) => {
    const y = row * lane + lane / 2;
    picture.append(svg("path", { d: `M${LEFT} ${y}H${width - RIGHT}`, class: "grid" }), mark(kinds[0], 14, y));
  });
  const shown = events.filter((e) => e.time >= from);
  for (const e of shown) {
    const row = LANES.findIndex((kinds) => kinds.includes(e.kind));
    picture.append(mark(e.kind, x(e.time), (row < 0 ? LANES.length - 1 : row) * lane + lane / 2));
  }
  timeTicks(picture, from, to, width, height, x);
  hover(host, picture, x, height - 22, shown, (e) => `${clock(e.time, true)}  ${named(e.kind)}\n${e.text || ""}`);
  host.replaceChildren(picture);
}

const NAMES = { accepted: "accepted", refused: "refused", rolled_back: "rolled back", skipped: "skipped" };
const named = (kind) => NAMES[kind] || String(kind);

function empty(host, height, text = "no images yet") {
  const room = html("p", { class: "empty" }, text);
  const picture = svg("svg", { height: Math.max(0, height - 64), "aria-hidden": "true" });
  host.replaceChildren(room, picture);
}

// What was where the pointer is. The picture is drawn anew every second, so the place is kept with its host.
const pointers = new WeakMap();
let tipOwner = null;
function hover(host, picture, x, bottom, items, describe) {
  const line = svg("path", { class: "hair" });
  picture.append(line);
  const show = (place) => {
    pointers.set(host, place);
    const box = picture.getBoundingClientRect();
    const at = place.clientX - box.left;
    let nearest = null;
    for (const item of items) if (!nearest || Math.abs(x(item.time) - at) < Math.abs(x(nearest.time) - at)) nearest = item;
    if (!nearest) return hide();
    line.setAttribute("d", `M${x(nearest.time)} 0V${bottom}`);
    tipOwner = host;
    const tip = byId("tip");
    tip.textContent = describe(nearest);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(8, Math.min(box.left + x(nearest.time) + 12, innerWidth - width - 8)) + "px";
    tip.style.top = Math.max(8, Math.min(place.clientY - height - 14, innerHeight - height - 8)) + "px";
    return undefined;
  };
  const hide = () => {
    pointers.delete(host);
    line.setAttribute("d", "");
    if (tipOwner === host) byId("tip").hidden = true;
  };
  picture.addEventListener("pointermove", (event) => show({ clientX: event.clientX, clientY: event.clientY }));
  picture.addEventListener("pointerleave", hide);
  const kept = pointers.get(host);
  if (kept) requestAnimationFrame(() => picture.isConnected && pointers.get(host) && show(kept));
}

// A stick from 1 (like the training images) to a camera's drift, on a scale of ratios from 1/2 to 8.
function lolly(drift) {
  const place = (v) => 4 + 92 * Math.min(1, Math.max(0, Math.log2(v / 0.5) / 4));
  const picture = svg("svg", { viewBox: "0 0 100 14", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: "M4 7H96", class: "track", "vector-effect": "non-scaling-stroke" }));
  if (known(drift)) {
    const end = place(Math.max(drift, 0.01));
    picture.append(
      svg("path", { d: `M${place(1)} 7H${end}`, class: "stick", "vector-effect": "non-scaling-stroke" }),
      svg("path", { d: `M${place(1)} 1V13`, class: "one", "vector-effect": "non-scaling-stroke" }),
      svg("path", { d: `M${end} 7h.01`, class: "stick knob", "vector-effect": "non-scaling-stroke" }));
  }
  return picture;
}

function bar(share) {
  const width = (100 * Math.min(1, Math.max(0, share))).toFixed(2);
  return svg("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { width: 100, height: 12, rx: 2, class: "back" }), svg("rect", { width, height: 12, rx: 1, class: "front" }));
}

// The page: what the server says, once a second, and what the buttons ask of it.

const TOKEN = "cafe-tta-token";
const WINDOW = 600; // seconds on the time axes
const SILENCE = 6000; // milliseconds without a word after which the connection counts as lost
let latest = null;
let heard = 0;
let stream = null;
let retry = 1000;
let busy = false;
let order = { key: "drift", up: false };

// Which model this page is of; where a server has one only, it need not be named.

const MODEL = new URLSearchParams(location.search).get("model");
function address(action) {
  return "api/" + action + (MODEL === null ? "" : "?model=" + encodeURIComponent(MODEL));
}

// Listening

function listen() {
  if (stream) stream.close();
  heard = Date.now();
  stream = new EventSource(address("events"));
  const take = (event) => {
    try {
      latest = JSON.parse(event.data);
    } catch {
      return;
    }
    heard = Date.now();
    retry = 1000;
    setLost(false);
    render();
  };
  stream.addEventListener("status", take);
  stream.onmessage = take;
  stream.onerror = () => {
    setLost(true);
    // The browser tries again by itself, but gives up where a proxy answers with an error.
    if (stream.readyState === EventSource.CLOSED) {
      later();
      if (MODEL === null) listIfSeveral();
    }
  };
}
// Where models were added since, the server asks which one: its first page lists them.
async function listIfSeveral() {
  const response = await fetch("api/status").catch(() => null);
  if (response && response.status === 409) location.reload();
}
let waiting = 0;
function later() {
  if (waiting) return;
  waiting = setTimeout(() => { waiting = 0; listen(); }, retry);
  retry = Math.min(15000, retry * 1.7);
}
setInterval(() => {
  if (Date.now() - heard > SILENCE && !waiting) {
    setLost(true);
    later();
  }
}, 1000);

function setLost(lost) {
  document.body.classList.toggle("stale", lost);
  const banner = byId("lost");
  if (lost && banner.hidden) {
    const last = latest ? `The numbers are those of ${clock(latest.now, true)}. ` : "";
    banner.textContent = `Connection lost. ${last}Trying again …`;
    write("state", "Connection lost");
    byId("state").dataset.state = "lost";
  }
  banner.hidden = !lost;
  buttons(lost);
}

// Asking

async function ask(action, body, done) {
  if (busy) return;
  busy = true;
  buttons(false);
  try {
    const token = sessionStorage.getItem(TOKEN);
    const headers = { "Content-Type": "application/json" };
    if (token) headers.Authorization = "Bearer " + token;
    const response = await fetch(address(action), { method: "POST", headers, body: JSON.stringify(body || {}) });
    if (response.status === 401 || response.status === 403) {
      sessionStorage.removeItem(TOKEN);
      busy = false;
      const why = token ? "This token was not accepted. Please try another." : "This server asks for its control token. It is kept until this tab is closed.";
      if (await askToken(why)) await ask(action, body, done);
      else tell("Nothing was changed: the server asks for a token.", true);
      return;
    }
    const answer = await response.json().catch(() => ({}));
    if (!response.ok || answer.error) tell(`Not done: ${answer.error || "the server answered " + response.status}`, true);
    else tell(done(answer), false);
  } catch {
    tell("Not done: the server does not answer.", true);
  } finally {
    busy = false;
    buttons(!byId("lost").hidden);
  }
}

function askToken(why) {
  const dialog = byId("token-dialog");
  write("token-why", why);
  byId("token").value = "";
  return confirmed(dialog, "token").then((yes) => {
    const token = byId("token").value.trim();
    byId("token").value = "";
    if (yes && token) sessionStorage.setItem(TOKEN, token);
    return Boolean(yes && token);
  });
}

function confirmed(dialog, first) {
  dialog.returnValue = "";
  dialog.showModal();
  if (first) byId(first).focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}
byId("token").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return; // the form's first button is Cancel, and Enter would press it
  event.preventDefault();
  byId("token-use").click();
});

let telling = 0;
function tell(text, bad) {
  const message = byId("message");
  message.textContent = text;
  message.hidden = false;
  message.classList.toggle("bad", bad);
  clearTimeout(telling);
  telling = setTimeout(() => { message.hidden = true; }, bad ? 20000 : 8000);
}

byId("pause").addEventListener("click", () => ask("pause", null, () => "Paused: images are answered, nothing is learnt."));
byId("resume").addEventListener("click", () => ask("resume", null, () => "Adapting again."));
byId("save").addEventListener("click", () => ask("save", null, (a) => (known(a.version) ? `Version ${a.version} is saved.` : "Saved.")));
byId("reset").addEventListener("click", async () => {
  if (await confirmed(byId("reset-dialog"))) await ask("reset", null, () => "Reset: the source model answers again.");
});
byId("rollback").addEventListener("click", async () => {
  const select = byId("rollback-version");
  const earlier = older();
  select.replaceChildren(...earlier.map((s) => html("option", { value: s.version }, describeSnapshot(s))));
  if (!earlier.length) return tell("There is no earlier version to go back to.", true);
  if (!(await confirmed(byId("rollback-dialog"), "rollback-version"))) return undefined;
  const version = Number(select.value);
  return ask("rollback", { version }, () => (version ? `Rolled back to version ${version}.` : "Rolled back to the source model."));
});

// What can be gone back to: the kept snapshots, and always the source model.
function older() {
  if (!latest) return [];
  const kept = (latest.snapshots || []).filter((s) => s.version !== 0).concat({ version: 0 });
  return kept.filter((s) => s.version !== latest.version).sort((a, b) => b.version - a.version);
}
function describeSnapshot(s) {
  if (s.version === 0) return "the source model, unadapted";
  const drift = known(s.alignment) ? `, alignment loss ${figure(s.alignment)}` : "";
  return `version ${s.version} of ${clock(s.time, true)}${drift}`;
}

function buttons(lost) {
  const off = lost || busy || !latest;
  const state = latest ? latest.state : "";
  const follows = Boolean(latest && latest.leader); // its leader is the one to ask
  byId("pause").disabled = off || !["adapting", "following", "alone"].includes(state);
  byId("resume").disabled = off || state !== "paused";
  byId("rollback").disabled = off || follows || !older().length;
  byId("save").disabled = off;
  byId("reset").disabled = off || follows;
}

// Showing


function render() {
  const s = latest;
  byId("stalled").hidden = !s.stalled;
  write("stalled", s.stalled ? `Adapting comes to nothing: ${s.stalled}.` : "");
  if (!s) return;
  const away = s.leader && s.leader.away;
  byId("leader").hidden = !away;
  write("leader", away ? `The leader at ${s.leader.url} is away since ${clock(s.leader.since, true)} (${away}). Version ${s.version} goes on answering; nothing is adapted to.` : "");
  write("name", s.name || "cafe-tta");
  document.title = `${s.name || "cafe-tta"} · ${STATES[s.state] || s.state}`;
  write("about", `${s.method} · version ${s.version}${s.version === 0 ? " (source model)" : ""} · up ${since(s.now - s.started)}${fleet(s)}`);
  write("state", STATES[s.state] || String(s.state));
  byId("state").dataset.state = s.state;
  write("clock", `as of ${clock(s.now, true)}`);
  buttons(false);
  tiles(s);
  const series = s.series || [];
  const events = s.events || [];
  const first = Math.min(s.now - 60, ...series.slice(0, 1).map((p) => p.time));
  const span = { from: Math.max(first, s.now - WINDOW), to: s.now };
  timePlots(s, series, events, span);
  cameras(s);
  groups(s);
  classes(s);
  clusters(s);
  happened(s, events);
}

// Which other servers this one adapts with.
function fleet(s) {
  if (s.leader) return ` · follows ${s.leader.url}`;
  const count = (s.followers || []).length;
  return count ? ` · leads ${count} ${count === 1 ? "follower" : "followers"}` : "";
}

function tiles(s) {
  const drift = (s.drift || {}).overall;
  const source = (s.drift || {}).source;
  const judgement = judged(drift);
  write("drift", figure(drift));
  byId("drift").className = "big " + judgement.kind;
  const without = known(source) ? ` · ${figure(source)} without adapting` : "";
  write("drift-more", s.images ? judgement.word + without : "no images yet");
  write("images", short(s.images));
  const taken = s.leader ? `${short(s.leader.sent_images)} sent to the leader` : `${short(s.adapted_images)} taken for adapting`;
  write("images-more", s.images ? taken : "no images yet");
  const last = (s.series || []).at(-1) || {};
  write("rate", known(last.images_per_second) ? figure(last.images_per_second) : "–");
  unit("latency", known(last.latency_p50_ms) ? figure(last.latency_p50_ms) : "–", known(last.latency_p50_ms) ? " ms" : "");
  write("latency-more", known(last.latency_p95_ms) ? `95 %: ${figure(last.latency_p95_ms)} ms` : "of recent requests");
  const steps = s.steps || {};
  write("steps", short(steps.accepted || 0));
  write("steps-more", `${short(steps.refused || 0)} refused · ${short(steps.rolled_back || 0)} rolled back`);
  write("waiting", s.waiting ? `The next step waits for ${s.waiting}.` : "");
}
function unit(id, text, small) {
  byId(id).replaceChildren(text, html("small", {}, small));
}

function legend(id, items) {
  byId(id).replaceChildren(...items.map(([picture, name, value]) => html("li", {}, picture, name, value === null ? null : html("b", {}, value))));
}

const plain = (v) => figure(v).replace(/\.0+$|(\.\d*?)0+$/, "$1");
const milliseconds = (v) => (v >= 1000 ? plain(v / 1000) + " s" : v ? whole.format(v) + " ms" : "0");

function timePlots(s, series, events, span) {
  const drift = s.drift || {};
  legend("drift-legend", [[sample("first"), "as answered", drift.overall], [sample("second"), "without adapting", drift.source]].map(([p, name, v]) => [p, name, known(v) ? figure(v) : null]));
  const curves = [{ key: "drift", name: "as answered", kind: "first" }, { key: "source_drift", name: "without adapting", kind: "second" }];
  const ratio = (v) => (v >= 1 ? String(v) : v.toFixed(v < 0.25 ? 3 : 2).replace(/0+$/, ""));
  lines(byId("drift-plot"), { ...span, curves: [...curves].reverse(), points: series, height: 196, scale: "ratio", guide: { value: 1, label: "1" }, format: ratio, timeAxis: false,
    label: `Drift over time. Now ${figure(drift.overall)} adapted, ${figure(drift.source)} without adapting.` });
  const steps = s.steps || {};
  legend("steps-legend", [...ALWAYS_SHOWN.map((kind) => [badge(kind), named(kind), short(steps[kind] || 0)]), [badge("other"), "control", null]]);
  timeline(byId("steps-plot"), { ...span, events, label: `Steps over time: ${ALWAYS_SHOWN.map((kind) => `${steps[kind] || 0} ${named(kind)}`).join(", ")}.` });
  const last = series.at(-1) || {};
  lines(byId("rate-plot"), { ...span, curves: [{ key: "images_per_second", name: "images a second", kind: "first" }], points: series, height: 192, filled: true, format: short,
    label: `Images a second over time. Now ${figure(last.images_per_second)}.` });
  legend("latency-legend", [[sample("first"), "median", null], [sample("second"), "95 %", null]]);
  lines(byId("latency-plot"), { ...span, curves: [{ key: "latency_p95_ms", name: "95 %", kind: "second", unit: " ms" }, { key: "latency_p50_ms", name: "median", kind: "first", unit: " ms" }], points: series, height: 192, format: milliseconds,
    label: `Latency in milliseconds over time. Now ${figure(last.latency_p50_ms)} median, ${figure(last.latency_p95_ms)} for 95 %.` });
}

const MODELS = { source: "the unadapted model answers this camera: its images look like the training images, or adapting did not help it", published: "the adapted model answers this camera" };

// Why nothing is learnt from a camera, where that is so.
function away(c) {
  if (c.opted_out) return html("span", { class: "away", title: "opted out: answered, not learnt from" }, " opted out");
  if (c.quarantined) return html("span", { class: "away", title: c.quarantined }, " quarantined");
  if (c.trusted) return null;
  return html("span", { class: "away", title: "new, or without a token: all such cameras together count as one" }, " new");
}

function cameras(s) {
  const all = [...(s.cameras || [])];
  const value = (c) => (order.key === "camera" ? String(c.camera) : known(c[order.key]) ? c[order.key] : -1);
  const sign = order.up ? 1 : -1;
  all.sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : String(a.camera).localeCompare(String(b.camera))));
  write("cameras-count", all.length > 6 ? `${all.length} cameras` : "");
  byId("cameras-empty").hidden = all.length > 0;
  byId("cameras").hidden = !all.length;
  byId("cameras").tBodies[0].replaceChildren(...all.slice(0, 200).map((c) => {
    const { kind, word } = judged(c.drift);
    const name = html("td", { title: c.camera }, String(c.camera), away(c));
    const text = known(c.drift) ? figure(c.drift) : "–";
    return html("tr", {}, name,
      html("td", { title: word }, html("div", { class: "lolly " + kind }, html("b", {}, text), lolly(c.drift))),
      html("td", { title: MODELS[c.model] }, c.model === "source" ? "source" : "adapted"),
      html("td", { class: "number", title: known(c.share) ? `${(100 * c.share).toFixed(1)} % of all images` : null }, short(c.images)),
      html("td", { class: "number" }, since(s.now - c.last_seen)),
      s.clusters ? fallen(c.clusters || []) : null);
  }));
}
// Which clusters the recent images of a camera fell into: the numbers of the larger ones, all shares in the tooltip.
function fallen(shares) {
  const large = shares.filter((c) => c.share >= 0.05).map((c) => c.cluster);
  const title = shares.map((c) => `cluster ${c.cluster}: ${(100 * c.share).toFixed(0)} %`).join("\n");
  return html("td", { class: "number", title: title || "in no cluster yet, or answered by the source model" }, large.length ? large.join(", ") : "–");
}
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const key = button.dataset.sort;
    order = { key, up: order.key === key ? !order.up : key === "camera" };
    for (const other of document.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
    button.closest("th").setAttribute("aria-sort", order.up ? "ascending" : "descending");
    render();
  });
}

function row(label, value, share, title) {
  return html("li", { title }, html("span", { class: "label" }, label), bar(share), html("span", { class: "value" }, value));
}
function groups(s) {
  const all = (s.groups || []).filter((g) => known(g.divergence)).slice(0, 8);
  const most = Math.max(1e-9, ...all.map((g) => g.divergence));
  byId("groups-empty").hidden = all.length > 0;
  byId("groups").replaceChildren(...all.map((g) => row(`${g.group} · ${g.dims} ${g.dims === 1 ? "feature" : "features"}`, figure(g.divergence), g.divergence / most, `group ${g.group}: divergence ${figure(g.divergence)} from the source statistics`)));
}
function classes(s) {
  let all = (s.classes || []).filter((c) => known(c.share));
  const total = all.length;
  if (total > 16) all = all.sort((a, b) => b.share - a.share).slice(0, 14);
  const most = Math.max(1e-9, ...all.map((c) => c.share));
  byId("classes-empty").hidden = all.length > 0;
  byId("classes").className = all.every((c) => String(c.class).length < 4) ? "bars short" : "bars";
  write("classes-count", total > 16 ? `the ${all.length} most frequent of ${total}` : "recent images");
  byId("classes").replaceChildren(...all.map((c) => row(String(c.class), (100 * c.share).toFixed(1) + " %", c.share / most, String(c.class))));
}

function clusters(s) {
  const all = s.clusters || [];
  for (const id of ["clusters-card", "cameras-clusters"]) byId(id).hidden = !s.clusters;
  document.querySelector("main").classList.toggle("unmixing", Boolean(s.clusters));
  const shown = all.slice(0, 12);
  const most = Math.max(1e-9, ...shown.map((c) => c.share));
  byId("clusters-empty").hidden = all.length > 0;
  write("clusters-count", all.length > shown.length ? `the ${shown.length} largest of ${all.length}` : "images adapted to");
  byId("clusters").replaceChildren(...shown.map((c) => row(String(c.cluster), short(c.images), c.share / most, `cluster ${c.cluster}: ${short(c.images)} images, ${(100 * c.share).toFixed(1)} %`)));
}

let newest = null;
function happened(s, events) {
  const last = events.length ? `${events.length} ${events.at(-1).id}` : "";
  byId("events-empty").hidden = events.length > 0;
  if (newest === last) return; // nothing new: whoever reads or scrolls there is left in peace
  newest = last;
  write("events-count", events.length > 8 ? `the last ${events.length}` : "");
  byId("events").replaceChildren(...[...events].reverse().map((e) => {
    const kind = NAMES[e.kind] || e.kind === "error" ? e.kind : "other";
    const title = ["alignment", "frechet", "entropy", "loss"].filter((k) => known(e[k])).map((k) => `${k} ${figure(e[k])}`).join(" · ");
    const time = html("time", { datetime: new Date(1000 * e.time).toISOString() }, clock(e.time, true));
    return html("li", { title: title || null }, time, badge(kind), html("p", {}, html("span", { class: "kind" }, named(e.kind)), e.text ? ": " + e.text : ""));
  }));
}

byId("all-models").hidden = MODEL === null;
byId("status-link").href = address("status");
let resized = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(render);
});
listen();

// The page that lists the models of a server, each with a link to its own page.

const EVERY = 2000; // milliseconds

async function look() {
  try {
    const response = await fetch("api/models", { cache: "no-store" });
    if (!response.ok) throw new Error(response.status);
    const models = await response.json();
    if (models.length < 2) return location.reload(); // the one model that is left has the first page
    setLost(false);
    show(models);
  } catch {
    setLost(true);
  }
  return setTimeout(look, EVERY);
}

function setLost(lost) {
  document.body.classList.toggle("stale", lost);
  byId("lost").hidden = !lost;
  write("lost", lost ? "Connection lost. Trying again …" : "");
}

function show(models) {
  const waiting = models.filter((m) => !m.ready).length;
  write("about", `${models.length} models${waiting ? `, ${waiting} not ready` : ""}`);
  write("clock", `as of ${clock(models[0].now, true)}`);
  byId("models").replaceChildren(...models.map(card));
}

function card(m) {
  const state = m.ready ? m.state : "lost";
  const pill = html("p", { class: "pill", "data-state": state }, m.ready ? STATES[m.state] || m.state : "Not ready");
  const link = html("a", { href: "?model=" + encodeURIComponent(m.name) }, m.name);
  const version = m.version === 0 ? "source model" : `version ${m.version}`;
  const drift = (m.drift || {}).overall;
  const judgement = judged(drift);
  const away = m.leader && m.leader.away ? `The leader at ${m.leader.url} is away: ${m.leader.away}.` : "";
  const problem = m.reason || away || (m.stalled ? `Adapting comes to nothing: ${m.stalled}.` : "");
  const quarantined = m.quarantined ? `, ${m.quarantined} quarantined` : "";
  return html("section", { class: "card model" },
    html("div", { class: "head" }, html("h2", {}, link), pill),
    html("p", { class: "big " + judgement.kind }, figure(drift), html("small", {}, ` drift · ${m.images ? judgement.word : "no images yet"}`)),
    html("p", {}, `${m.method} · ${version} · up ${since(m.now - m.started)}`),
    html("p", { class: "muted" }, `${short(m.images)} images, ${figure(m.images_per_second)} a second · ${m.cameras} ${m.cameras === 1 ? "camera" : "cameras"}${quarantined}`),
    html("p", { class: "muted" }, `${short(m.steps.accepted)} steps accepted, ${short(m.steps.refused)} refused, ${short(m.steps.rolled_back)} rolled back`),
    problem ? html("p", { class: "note far" }, problem) : null);
}
look();

"use strict";
// The page: takes sections from the report's data or from the server's stream, and draws those that have changed.

const PARTS = ["compute", "input", "update", "script", "wait", "communication"];
const PART_NAMES = {compute: "compute", input: "wait for a batch", update: "update", script: "between steps", wait: "wait for others", communication: "communication"};
const MAX_ROWS = 300;
const find = id => document.getElementById(id);
const run = {};
const charts = {};
let theme = "";

function table(heads, rows) {
  const cell = (kind, value, number) => element(kind, {class: number ? "number" : null, scope: kind === "th" ? "col" : null}, value);
  return element("table", {}, element("thead", {}, element("tr", {}, ...heads.map(([name, number]) => cell("th", name, number)))),
    element("tbody", {}, ...rows.map(row => row instanceof Node ? row : element("tr", {}, ...row.map((value, index) =>
      value instanceof Node && value.tagName === "TD" ? value : cell("td", value, heads[index][1]))))));
}

/** Replace the content of a box; what was open, focused and scrolled stays so. */
function replace(box, ...content) {
  const opened = [...box.querySelectorAll("details")].map(each => each.open), isTall = box.classList.contains("tall"), place = isTall ? box.scrollTop : 0;
  const focusable = () => [...box.querySelectorAll("summary, button")];
  const at = focusable().indexOf(document.activeElement);
  box.replaceChildren(...content.filter(Boolean));
  box.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(opened[index]); });
  if (isTall) box.scrollTop = place;
  if (at >= 0 && focusable()[at]) focusable()[at].focus({preventScroll: true});
}

function put(card, box, ...content) {
  find(card).hidden = false;
  replace(find(box), ...content);
}

const draw = {
  head(head) {
    document.title = `${head.name} – ringweave`;
    find("name").textContent = head.name;
    const state = find("state");
    state.textContent = head.state;
    state.className = `state ${{Succeeded: "good", Failed: "bad", Stopped: "bad"}[head.state] || (head.is_over ? "bad" : "going")}`;
    find("since").textContent = head.ended_s > head.created_s ? `for ${showSeconds(head.ended_s - head.created_s)}, until ${new Date(head.ended_s * 1000).toLocaleString("en-GB")}` : `since ${new Date(head.created_s * 1000).toLocaleString("en-GB")}`;
    const reason = head.state === "Succeeded" ? null : head.trouble || (head.reason && `${head.reason}. ${head.hint || ""}`);
    find("reason").hidden = !reason;
    find("reason").textContent = reason || "";
    find("reason").className = head.state === "Stopped" ? "stopped" : "";
    find("facts").textContent = `${head.workers} workers (${head.device}) on ${head.num_nodes} node${head.num_nodes === 1 ? "" : "s"} of ${head.platform}, requested by ${head.requester}. ${head.files}`;
  },

  verdict(verdict) {
    find("verdict").className = `verdict ${verdict.losses.length ? "lossy" : verdict.is_known ? "well" : ""}`;
    find("losses").replaceChildren(...verdict.losses.map(loss => element("p", {}, loss.text)), ...verdict.losses.length ? [] : [element("p", {}, verdict.silence)]);
  },

  loss(loss) {
    find("loss-card").hidden = !loss || !loss.times.length;
    if (find("loss-card").hidden) return;
    find("charts").hidden = false;
    charts.loss ??= new TimeChart(find("loss"), value => showNumber(value, 4));
    const last = loss.mean[loss.mean.length - 1];
    charts.loss.draw(loss.times, [{name: "loss", colour: colour("accent"), values: loss.mean, low: loss.min, high: loss.max}],
      `Loss over time, from ${showNumber(loss.mean[0], 4)} to ${showNumber(last, 4)}.`);
  },

  steps(steps) {
    for (const name of ["rate", "step", "waits"]) find(`${name}-card`).hidden = !steps;
    if (!steps) return;
    find("charts").hidden = false;
    const known = steps.samples_per_s.filter(value => value !== null);
    charts.rate ??= new TimeChart(find("rate"), value => showNumber(value));
    charts.rate.draw(steps.times, [{name: "samples per second, all ranks", colour: colour("accent"), values: steps.samples_per_s}],
      `Samples per second over time, between ${showNumber(Math.min(...known))} and ${showNumber(Math.max(...known))}.`);
    charts.parts ??= new TimeChart(find("parts"), showSeconds);
    const shown = PARTS.filter(name => steps.parts[name].some(value => value));
    const sums = steps.times.map(() => 0);
    const stacked = shown.map(name => ({name: PART_NAMES[name], colour: colour(name), values: steps.parts[name],
      top: steps.parts[name].map((value, index) => value === null ? null : (sums[index] += value))}));
    const extremes = [["fastest rank", "min"], ["slowest rank", "max"]].map(([name, key]) => ({name, colour: colour(key === "max" ? "alarm" : "text"), values: steps.step_s[key], dash: key === "max" ? [2, 2] : [6, 4]}));
    charts.parts.draw(steps.times, [...stacked.reverse(), ...extremes], "Parts of a mean train step over time, stacked, and the step of the fastest and the slowest rank.");
    drawWaits(find("waits"), steps);
    find("waits-card").hidden = steps.waits.ranks.length < 2;
  },

  ranks(ranks) {
    find("ranks-card").hidden = !ranks.rows.length && !(run.head && run.head.nodes.length);
    drawNodes(ranks);
    if (!ranks.rows.length) return;
    const has = key => ranks.rows.some(row => row[key] !== null && row[key] !== undefined);
    const longest = Math.max(...ranks.rows.map(row => row.step && row.step.wall_s || 0));
    const columns = [["rank", false, row => row.rank], ["node", false, row => row.node], ["state", false, row => row.state]];
    if (has("share")) columns.push(["share", true, row => row.share ?? "–"]);
    if (has("memory_bytes")) columns.push(["memory", true, row => row.memory_limit_bytes ? `${showBytes(row.memory_bytes)} of ${showBytes(row.memory_limit_bytes)}` : showBytes(row.memory_bytes)]);
    if (has("memory_limit_bytes")) columns.push(["samples at once (predicted)", true, row => row.predicted_samples_at_once ?? "–"]);
    partsTable(find("ranks"), columns, ranks.rows, longest, row => {
      const choose = element("button", {type: "button", "aria-label": `Show events and output of rank ${row.rank}`}, row.rank);
      choose.addEventListener("click", () => { find("rank").value = row.rank; records(); draw.ranks(run.ranks); find("records-card").scrollIntoView(); });
      return choose;
    }, true);
    [...find("ranks").querySelectorAll("tbody tr")].forEach((line, index) => {
      line.className = find("rank").value === String(ranks.rows[index].rank) ? "chosen" : "";
      line.cells[2].className = /killed|failed/.test(ranks.rows[index].state) ? "bad" : "";
    });
    find("ranks-note").textContent = longest ? `Means of ${ranks.last_s ? "the last minute" : "the whole attempt"}, measured. Communication is the least exchange of any rank that exchanges with it; ` +
      `what a rank has beyond that is its wait for others.${has("share") ? " Share: samples of a batch." : ""}` : "";
    const select = find("rank"), options = ["", ...ranks.rows.map(row => String(row.rank))];
    if (select.options.length !== options.length) {
      const chosen = select.value;
      select.replaceChildren(...options.map(value => element("option", {value}, value || "all")));
      select.value = chosen;
    }
  },

  training(training) {
    find("training").hidden = !training;
    if (!training) return;
    const rows = (run.ranks ? run.ranks.rows : []).map(row => row.step && row.step.compute_s || 0), slowest = Math.max(0, ...rows);
    const requested = training.requested_mode === training.mode ? "" : ` (requested: ${training.requested_mode})`;
    const shares = training.predicted_after_s === null ? "" : ` The last change of shares: computing of the slowest rank ${showSeconds(training.predicted_before_s)} before, ${showSeconds(training.predicted_after_s)} after it (predicted)` +
      (slowest ? `, ${showSeconds(slowest)} now (measured).` : ".");
    find("training").textContent = `Mode ${training.mode}${requested}: ${training.reason}.${shares}`;
  },

  topology(topology) {
    if (!topology) return;
    const said = [];
    if (topology.binding) said.push(element("p", {}, "The bound is set by ", element("b", {}, topology.binding), ` (predicted, plan ${topology.version} of group ${topology.group}).`));
    if (topology.why) said.push(element("p", {}, `The plan was changed: ${topology.why}.`));
    const agreed = topology.agreed.length ? element("details", {}, element("summary", {}, `${topology.agreed.length} schedules agreed on`),
      table([["collective"], ["schedule"], ["size", true]], topology.agreed.map(row => [row.collective, row.schedule, showBytes(row.bytes)]))) : null;
    const links = topology.links.length ? element("details", {}, element("summary", {}, `Rates of ${topology.links.length} links, the slowest first`),
      table([["link"], ["measured", true], ["cluster file", true]], topology.links.map(row => [row.name, showRate(row.bytes_per_s), showRate(row.described_bytes_per_s)]))) : null;
    const note = topology.tree ? element("p", {class: "note"}, `Links of cluster ${topology.cluster}, at the rates of its file unless measured; red and dashed: the links that bind (predicted).`) : null;
    put("topology-card", "topology", topology.tree && drawTree(topology.tree), note, ...said, agreed, links);
  },

  timeline(line) {
    if (!line) return;
    const list = element("details", {}, element("summary", {}, "As a list"), table([["time"], ["event"]], [
      ...line.attempts.map(each => [each.begin_s, `attempt ${each.number}: ${each.outcome || "goes on"}`]),
      ...line.generations.map(each => [each.time_s, `generation ${each.term}.${each.number}, ${each.num_members} members`]),
      ...line.lives.filter(each => each.is_death).map(each => [each.end_s, `rank ${each.rank} on ${each.node} died: ${each.how}`]),
      ...line.marks.map(each => [each.time_s, `${each.kind}: ${each.text}`]),
    ].sort((a, b) => a[0] - b[0]).map(([time, text]) => [showClock(time), text])));
    const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
    const counts = `${count(line.num_deaths, "death")} of workers (crosses), ${count(line.num_generations, "generation")}, ${count(line.num_marks, "marked event")}.`;
    const shown = [[line.lives, line.num_lives, "lives of workers"], [line.generations, line.num_generations, "generations"], [line.marks, line.num_marks, "marked events"]]
      .filter(([rows, number]) => rows.length < number).map(([rows, number, noun]) => `last ${rows.length} of ${number} ${noun}`);
    const left = shown.length ? ` Shown are the ${shown.join(", ")}.` : "";
    put("timeline-card", "timeline", drawTimeline(line, run.written_s || Date.now() / 1000, run.head && run.head.is_over), element("p", {class: "note"}, counts + left), list);
  },

  collectives(rows) {
    if (!rows) return;
    const heads = [["collective"], ["schedule"], ["wire format"], ["size", true], ["bound (predicted)", true], ["predicted", true], ["measured", true], ["measured / predicted", true], ["group"]];
    put("collectives-card", "collectives", table(heads, rows.map(row => [row.collective, row.schedule, row.wire_fraction === null ? row.wire : `${row.wire}, ${showNumber(100 * row.wire_fraction)} % of the bytes on slow links`, showBytes(row.bytes), showSeconds(row.bound_s), showSeconds(row.predicted_s),
      showSeconds(row.measured_s), showNumber(row.measured_over_predicted), `${row.group}, plan ${row.version}`])));
    find("collectives").classList.toggle("tall", rows.length > 16);
  },

  traffic() {
    const {traffic, peers} = run;
    if (!traffic && !peers) return;
    const content = [];
    if (traffic) content.push(table([["schedule"], ["collectives", true], ["bytes", true], ["messages", true]],
      Object.entries(traffic).map(([name, row]) => [name, row.collectives.toLocaleString("en"), showBytes(row.bytes), row.messages.toLocaleString("en")])));
    if (peers) content.push(element("details", {}, element("summary", {}, "From rank to rank, the slowest first"), table([["from"], ["to"], ["bytes", true], ["rate", true]],
      peers.map(row => [`rank ${row.rank}`, `rank ${row.peer}`, showBytes(row.sent_bytes), showRate(row.bytes_per_s)]))));
    put("traffic-card", "traffic", ...content);
  },
  peers() { draw.traffic(); },

  rings(rings) {
    if (!rings) return;
    find("groups-title").textContent = "Rings and the parameter server";
    const content = [table([["ring"], ["ranks"], ["pushes (measured)", true]], rings.rings.map((ring, index) => [index, ring.join(", "), rings.pushes ? rings.pushes[index] ?? "–" : "–"]))];
    if (rings.staleness) {
      const rows = Object.entries(rings.staleness).map(([versions, pushes]) => [Number(versions), pushes]).sort((a, b) => a[0] - b[0]);
      const most = Math.max(1, ...rows.map(row => row[1]));
      content.push(element("h3", {}, `Staleness of pushes, in versions (measured; bound ${rings.most_staleness_versions ?? "unknown"})`), table([["versions", true], ["pushes", true], [""]],
        rows.map(([versions, pushes]) => [versions, pushes, element("td", {class: "wide"}, element("div", {class: "bar"}, element("span", {style: {background: "var(--accent)", width: `${100 * pushes / most}%`}})))])));
      content.push(element("p", {class: "note"}, `Version ${rings.version}; ${showBytes(rings.received_bytes)} received, ${showBytes(rings.sent_bytes)} sent (measured).`));
    }
    put("groups-card", "groups", ...content);
  },

  sites(sites) {
    if (!sites) return;
    find("groups-title").textContent = "Sites";
    const content = [table([["site"], ["ranks"], ["inner steps", true], ["computing in a round (measured)", true]], sites.sites.map((site, index) =>
      [index, site.join(", "), sites.inner_steps ? sites.inner_steps[index] : "–", sites.computing_s ? showSeconds(sites.computing_s[index]) : "–"]))];
    if (sites.number) content.push(element("p", {}, `${sites.number} outer exchanges in ${sites.train_steps} train steps: sites exchanged in 1 step of ${showNumber(sites.train_steps / sites.number)}, ` +
      `${showNumber(100 - 100 * sites.number / sites.train_steps)} % of the exchanges of synchronous training are saved (measured). The last one took ${showSeconds(sites.exchange_s)}, after a wait of ${showSeconds(sites.wait_s)}.` +
      (sites.sent_bytes ? ` Each site has sent ${showBytes(sites.sent_bytes)} to each other one (measured).` : "")));
    put("groups-card", "groups", ...content);
  },

  stages(stages) {
    if (!stages) return;
    const edges = [0, ...stages.splits, stages.blocks], most = Math.max(...stages.compute_s);
    put("stages-card", "stages", table([["stage", true], ["blocks", true], ["compute", true], ["balance (measured)"]], stages.compute_s.map((seconds, index) =>
      [index, edges[index + 1] - edges[index], showSeconds(seconds), element("td", {class: "wide"}, element("div", {class: "bar"}, element("span", {style: {background: "var(--compute)", width: `${100 * seconds / most}%`}})))])),
    element("p", {class: "note"}, `A train step: ${showSeconds(stages.predicted_s)} simulated, ${showSeconds(stages.measured_s)} measured.${stages.decision ? ` Last search for a better partition: ${stages.decision}.` : ""}`));
  },

  logs(logs) {
    const select = find("rank");
    if (run.ranks && !run.ranks.rows.length && select.options.length === 1) {
      for (const source of logs.sources) if (source.source.startsWith("rank ")) select.append(element("option", {value: source.source.slice(5)}, source.source.slice(5)));
    }
  },

  counts(counts) {
    find("unread").hidden = !counts.unread;
    find("unread").textContent = counts.unread_text;
  },

  left_out(texts) {
    find("left-out-card").hidden = !texts.length;
    find("left-out").replaceChildren(...texts.map(text => element("li", {}, text)));
  },
};

const STEP_COLUMNS = ["compute", "wait", "communication", "wall"];

/** Table of ranks or nodes with the parts of a step; its cells are filled in place: an update of many ranks creates no elements. */
function partsTable(box, columns, rows, longest, first, hasLegend = false) {
  const all = longest ? [...columns, ...STEP_COLUMNS.map(name => [name === "wall" ? "step" : name, true, row => showSeconds(row.step && row.step[`${name}_s`])])] : columns;
  const signature = JSON.stringify([all.map(each => each[0]), rows.map(row => columns[0][2](row))]);
  if (box.dataset.signature !== signature) {
    const bar = () => element("div", {class: "bar", "aria-hidden": "true"}, ...PARTS.map(name => element("span", {style: {background: `var(--${name})`}})));
    const lines = rows.map(row => element("tr", {}, ...all.map(([, isNumber], index) => element("td", {class: isNumber ? "number" : null}, index ? null : first(row))),
      longest ? element("td", {class: "wide"}, bar()) : null));
    const legend = longest && hasLegend ? element("ul", {class: "legend"}, ...PARTS.map(name => element("li", {}, element("i", {style: {background: `var(--${name})`}}), PART_NAMES[name]))) : null;
    box.classList.toggle("tall", rows.length > 24);
    box.dataset.signature = signature;
    replace(box, table([...all.map(([name, isNumber]) => [name, isNumber]), ...longest ? [["parts of a step (measured)"]] : []], lines), legend);
  }
  [...box.querySelectorAll("tbody tr")].forEach((line, at) => {
    all.forEach(([, , text], index) => {
      const value = String(text(rows[at]));
      if (index && line.cells[index].textContent !== value) line.cells[index].textContent = value;
    });
    if (longest) PARTS.forEach((name, index) => { line.lastElementChild.firstElementChild.children[index].style.width = `${100 * ((rows[at].step || {})[`${name}_s`] || 0) / longest}%`; });
  });
}

/** Table of nodes, where it says more than that of ranks: as the platform sees them, and as their ranks measure. */
function drawNodes(ranks) {
  const seen = run.head ? run.head.nodes : [], measured = ranks.nodes;
  const names = [...new Set([...seen, ...measured].map(node => node.name))];
  const rows = names.map(name => ({name, ...seen.find(node => node.name === name), ...measured.find(node => node.name === name)}));
  const has = key => rows.some(row => row[key] !== null && row[key] !== undefined);
  const addsMore = rows.length > 1 && (ranks.rows.length > rows.length || rows.some(row => row.reason || row.attempts > 1));
  find("nodes").hidden = find("ranks-title").hidden = ranks.rows.length > 0 && !addsMore;
  if (find("nodes").hidden) return;
  const columns = [["node", false, row => row.name], ["ranks", false, row => row.ranks ?? `${row.workers} workers`]];
  if (has("state")) columns.push(["state", false, row => row.reason ? `${row.state}: ${row.reason}` : row.state ?? "–"]);
  if (has("attempts")) columns.push(["attempts", true, row => row.attempts ?? "–"]);
  if (has("iterations")) columns.push(["train steps", true, row => row.iterations ?? "–"], ["loss", true, row => showNumber(row.loss, 4)]);
  if (has("share")) columns.push(["share", true, row => row.share ?? "–"]);
  if (has("memory_bytes")) columns.push(["memory", true, row => showBytes(row.memory_bytes)]);
  partsTable(find("nodes"), columns, rows, Math.max(...rows.map(row => row.step && row.step.wall_s || 0)), row => row.name);
}

function tiles() {
  const {progress, head, training, ranks} = run;
  if (!progress || !head) return;
  const tiles = [];
  const tile = (name, value, note, extra) => tiles.push(element("div", {}, element("dt", {}, name), element("dd", {}, value, note ? element("small", {}, note) : null, extra || null)));
  if (progress.train_step !== null) tile("Train step", progress.train_step.toLocaleString("en"), progress.total ? `of ${progress.total.toLocaleString("en")}` : null,
    progress.total ? element("progress", {max: progress.total, value: progress.train_step, "aria-label": "Train steps done"}) : null);
  const span = head.is_over ? "mean of the run" : "last minute";
  if (progress.samples_per_s !== null) tile("Samples per second", showNumber(progress.samples_per_s), `measured, ${span}`);
  if (progress.predicted_left_s !== null) tile("Time to go", showSeconds(progress.predicted_left_s), "predicted by the last minute's pace");
  if (progress.loss !== null) tile("Loss", showNumber(progress.loss, 4), "measured, last reported");
  const steps = (ranks ? ranks.rows : []).map(row => row.step).filter(step => step && step.wall_s);
  if (steps.length) {
    const part = name => steps.reduce((sum, step) => sum + (step[`${name}_s`] || 0) / step.wall_s, 0) / steps.length;
    tile("Time computing", `${Math.round(100 * (part("compute") + part("update")))} %`, `measured; ${Math.round(100 * part("wait"))} % wait, ${Math.round(100 * part("communication"))} % communication`);
  }
  const alive = (ranks ? ranks.rows : []).filter(row => row.state === "running").length;
  tile("Workers", head.is_over ? head.workers : `${alive} of ${head.workers}`, head.is_over ? null : "running");
  if (training) tile("Mode", training.mode, [training.batch_samples ? `${training.batch_samples} samples in a step` : "", training.is_exact ? "each exactly once" : ""].filter(Boolean).join("; "));
  find("tiles").replaceChildren(...tiles);
}

/** Events and output side by side, of the chosen rank, with the searched text. */
function records() {
  const rank = find("rank").value, search = find("search").value.toLowerCase();
  const matches = text => !search || text.toLowerCase().includes(search);
  if (run.events) {
    const found = run.events.rows.filter(row => (rank === "" || row.rank === null || row.rank === undefined || String(row.rank) === rank) && matches(`${row.kind} ${row.text}`));
    const rows = found.slice(-MAX_ROWS);
    lines("events", rows.map(row => element("div", {class: row.is_failure ? "bad" : null}, element("time", {}, showClock(row.time_s)), " ",
      element("em", {title: run.events.meanings[row.kind]}, row.kind), " ", row.text)), rows.length ? "" : "no events");
    const few = found.length < run.events.rows.length ? `${found.length} found in the newest ${run.events.rows.length}` : run.events.num;
    find("events-count").textContent = `the newest ${rows.length} of ${few}; measurements are in the charts`;
  }
  if (run.logs) {
    const sources = run.logs.sources.filter(source => rank === "" || source.source === `rank ${rank}`);
    const few = rank === "" ? Math.max(3, Math.floor(200 / Math.max(1, sources.length))) : MAX_ROWS;
    const rows = [];
    for (const source of sources) {
      const found = source.lines.filter(matches), shown = found.slice(-few);
      if (shown.length) rows.push(element("div", {}, element("b", {}, `${source.source}, ${shown.length} of ${source.left_out + source.lines.length} lines`)));
      rows.push(...shown.map(line => element("div", {}, line)));
    }
    lines("logs", rows, run.logs.trouble || (rows.length ? "" : "no output"));
    find("logs-count").textContent = rank === "" ? "last lines of each rank; choose a rank for more" : `of rank ${rank}`;
  }
}

/** Replace the lines of a box; it stays at its end if it was there. */
function lines(id, rows, nothing) {
  const box = find(id), isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 8 || !box.children.length;
  box.replaceChildren(...rows, ...nothing ? [element("div", {}, nothing)] : []);
  if (isAtEnd) box.scrollTop = box.scrollHeight;
}

function apply(sections) {
  performance.mark("update-begins");
  Object.assign(run, sections);
  const names = Object.keys(sections), changed = wanted => wanted.some(name => names.includes(name));
  for (const name of names) if (draw[name]) draw[name](sections[name]);
  if (changed(["head", "progress", "training", "ranks"])) tiles();
  if (run.ranks && changed(["head"]) && !names.includes("ranks")) draw.ranks(run.ranks);
  if (changed(["ranks"]) && !names.includes("training")) draw.training(run.training);
  if (changed(["events", "logs"])) records();
  performance.measure("update", "update-begins");
}

function redraw() {
  for (const chart of Object.values(charts)) chart.forget();
  find("waits").replaceChildren();
  apply({...run});
}

function follow() {
  const fresh = find("freshness"), stream = new EventSource("live");
  let newest = 0;
  stream.onmessage = event => { newest = Date.now(); apply(JSON.parse(event.data)); };
  setInterval(() => {
    const age = Math.round((Date.now() - newest) / 1000);
    fresh.textContent = run.head && run.head.is_over ? "the run is over" : newest && age < 5 ? "live" : newest ? `no news for ${age} s` : "reading";
  }, 1000);
}

find("theme").addEventListener("change", event => {
  theme = event.target.value;
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  redraw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
find("rank").addEventListener("change", () => { records(); if (run.ranks) draw.ranks(run.ranks); });
find("search").addEventListener("input", records);

const data = find("data");
if (data) {
  const sections = JSON.parse(data.textContent);
  apply(sections);
  find("freshness").textContent = `written ${new Date(sections.written_s * 1000).toLocaleString("en-GB")}`;
} else {
  follow();
}

"use strict";
// Drawings: the tree of switches and nodes, and the time line of attempts, workers and generations.

function shape(name, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, String(value));
  made.append(...children.map(each => each instanceof Node ? each : String(each)));
  return made;
}

/** Tree of switches: the root on the left, a row for each node; the links that bind are red and dashed. */
function drawTree(root, width = 640) {
  const rows = [], links = [];
  const depth = item => item.children.length ? 1 + Math.max(...item.children.map(depth)) : 0;
  const tagsOf = item => [item.is_measured ? "measured" : "", item.is_binding ? "binds" : ""].filter(Boolean).join(", ");
  const longest = (item, at) => Math.max(0, ...item.children.map(child => at ? longest(child, at - 1) : Math.max((child.rate || "").length, tagsOf(child).length)));
  const longestLabel = item => Math.max(item.children.length ? 0 : item.label.length, ...item.children.map(longestLabel));
  const places = [8], height = 36;
  for (let at = 0; at < depth(root); at += 1) places.push(places[at] + Math.max(96, 52 + 6.3 * longest(root, at)));
  width = Math.max(width, places[places.length - 1] + 24 + 7 * longestLabel(root));
  const place = (item, at) => {
    const children = item.children.map(child => place(child, at + 1));
    const y = children.length ? (children[0].y + children[children.length - 1].y) / 2 : rows.length * height + 18;
    const placed = {item, x: places[at], y, children};
    if (!children.length) rows.push(placed);
    links.push(...children.map(child => [placed, child]));
    return placed;
  };
  const top = place(root, 0);
  const rates = links.map(([, child]) => child.item.bytes_per_s).filter(Boolean);
  const thick = rate => rate && rates.length ? 1.2 + 3.3 * Math.log1p(9 * rate / Math.max(...rates)) / Math.log(10) : 1.2;
  const drawing = shape("svg", {viewBox: `0 0 ${width} ${rows.length * height + 14}`, role: "img"});
  const words = [];
  for (const [from, to] of links) {
    const item = to.item, bend = from.x + 28;
    drawing.append(shape("path", {d: `M${from.x} ${from.y}H${bend}V${to.y}H${to.x - (item.is_switch ? 5 : 3)}`, fill: "none",
      stroke: item.is_binding ? "var(--alarm)" : "var(--dim)", "stroke-width": thick(item.bytes_per_s).toFixed(1),
      "stroke-dasharray": item.is_binding ? "7 3" : null, "stroke-linejoin": "round"}));
    const said = item.rate && `${item.rate}${item.is_measured ? " measured" : ""}${item.is_binding ? ", binds" : ""}`;
    const kind = item.is_binding ? "dim alarm" : "dim";
    if (item.rate) drawing.append(shape("text", {x: bend + 5, y: to.y - 5, class: kind}, item.rate), shape("text", {x: bend + 5, y: to.y + 12, class: kind}, tagsOf(item)));
    words.push(`${item.label}: ${said || "several rates"}`);
  }
  const label = placed => {
    const {item, x, y} = placed;
    drawing.append(item.is_switch ? shape("rect", {x: x - 6, y: y - 6, width: 12, height: 12, rx: 2, fill: "var(--accent)"})
      : shape("circle", {cx: x, cy: y, r: 4, fill: "var(--text)"}));
    drawing.append(item.children.length ? shape("text", {x: x - 6, y: y - 10}, item.label) : shape("text", {x: x + 9, y: y + 4}, item.label));
    placed.children.forEach(label);
  };
  label(top);
  drawing.setAttribute("aria-label", `Tree of the network. ${words.slice(0, 60).join("; ")}.`);
  return drawing;
}

const MARKS = {fault_begun: "⚡", member_lost: "✕", standstill: "‖", plan_changed: "⟳", shares_changed: "≠", mode_reconsidered: "⟳", workers_scaled: "±",
  blocks_moved: "⇄", move_failed: "⇄", checkpoint_failed: "!", checkpoint_refused: "!", communication_failed: "!", server_exited: "✕"};

/** A lane for each rank with the lives of its workers; attempts and generations above, deaths as crosses. */
function drawTimeline(line, nowS, isOver, width = 640) {
  const ranks = [...new Set(line.lives.map(life => life.rank))].sort((a, b) => a - b);
  const begin = Math.min(...line.attempts.map(each => each.begin_s), ...line.lives.map(each => each.begin_s));
  const ends = [...line.attempts.map(each => each.end_s), ...line.lives.map(each => each.end_s), ...line.marks.map(each => each.time_s)].filter(Boolean);
  const isOpen = !isOver && line.lives.some(life => life.end_s === null) && !(line.attempts.length && line.attempts[line.attempts.length - 1].end_s);
  const end = Math.max(begin + 1, ...ends, isOpen ? nowS : 0);
  const left = 66, right = width - 10, lane = Math.max(5, Math.min(17, Math.floor(300 / ranks.length))), top = 64;
  const x = time => (left + (right - left) * Math.min(1, Math.max(0, (time - begin) / (end - begin)))).toFixed(1);
  const drawing = shape("svg", {viewBox: `0 0 ${width} ${top + lane * ranks.length + 24}`, role: "img"});
  const titled = (node, text) => { node.append(shape("title", {}, text)); return node; };
  const name = (text, y) => drawing.append(shape("text", {x: left - 6, y, "text-anchor": "end", class: "dim"}, text));
  name("attempt", 16); name("generation", 34); name("events", 52);
  for (const each of line.attempts) {
    const x0 = Number(x(each.begin_s)), x1 = Number(x(each.end_s ?? end));
    drawing.append(titled(shape("rect", {x: x0, y: 6, width: Math.max(2, x1 - x0 - 1), height: 13, rx: 2, fill: each.outcome === "failed" ? "var(--alarm)" : "var(--accent)", opacity: 0.85}),
      `attempt ${each.number}: ${each.outcome || "goes on"}${each.cause ? `, ${each.cause}` : ""}`));
  }
  for (const each of line.generations) drawing.append(titled(shape("path", {d: `M${x(each.time_s)} 24v12`, stroke: "var(--dim)", "stroke-width": 1.5}),
    `${showClock(each.time_s)}: generation ${each.term}.${each.number}${each.part ? ` of ${each.part}` : ""}, ${each.num_members} members`));
  let before = -99;
  for (const each of line.marks) {
    const at = Number(x(each.time_s));
    if (at - before < 12) continue;
    before = at;
    drawing.append(titled(shape("text", {x: at, y: 53, "text-anchor": "middle"}, MARKS[each.kind] || "•"), `${showClock(each.time_s)}: ${each.kind}, ${each.text}`));
  }
  const every = Math.ceil(13 / lane);
  ranks.forEach((rank, index) => { if (index % every === 0) name(`rank ${rank}`, top + lane * (index + 0.5) + 4); });
  const crosses = [];
  for (const life of line.lives) {
    const y = top + lane * ranks.indexOf(life.rank), x0 = Number(x(life.begin_s)), x1 = Number(x(life.end_s ?? end));
    drawing.append(titled(shape("rect", {x: x0, y: y + 1, width: Math.max(1.5, x1 - x0), height: Math.max(3, lane - 2), fill: "var(--good)", opacity: 0.7}),
      `rank ${life.rank} on ${life.node}, ${showClock(life.begin_s)} to ${life.end_s ? `${showClock(life.end_s)}: ${life.how}` : "now"}`));
    if (life.is_death) for (const [stroke, thick] of [["var(--card)", 5], ["var(--alarm)", 2]])
      crosses.push(shape("path", {d: `M${x1 - 3.5} ${y + lane / 2 - 3.5}l7 7m0 -7l-7 7`, stroke, "stroke-width": thick}));
  }
  drawing.append(...crosses);
  const bottom = top + lane * ranks.length + 16;
  drawing.append(shape("text", {x: left, y: bottom, class: "dim"}, showClock(begin)), shape("text", {x: right, y: bottom, "text-anchor": "end", class: "dim"}, showClock(end)));
  drawing.setAttribute("aria-label", `Time line of ${showSeconds(end - begin)}: ${line.attempts.length} attempts, ${ranks.length} ranks, ` +
    `${line.num_deaths} deaths of workers, ${line.num_generations} generations. The list below has the same.`);
  return drawing;
}

"use strict";
// Charts over time: curves by uPlot, and the map of waits on a canvas. Texts reach the page as text nodes alone.

/** Create an element: attributes, then children (elements or texts). */
function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "style") Object.assign(made.style, value);
    else if (key === "class") made.className = value;
    else if (value === true) made.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, String(value));
  }
  made.append(...children.filter(each => each !== null && each !== undefined).map(each => each instanceof Node ? each : String(each)));
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function showNumber(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(digits - 1);
  return Math.abs(value) >= 10 ** digits ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(digits)).toString();
}

function showSeconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${showNumber(value * 1e6)} µs`;
  if (value < 1) return `${showNumber(value * 1e3)} ms`;
  if (value < 120) return `${showNumber(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round(value % 3600 / 60)} min`;
}

function showBytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let index = 0;
  while (value >= 1000 && index < units.length - 1) { value /= 1000; index += 1; }
  return `${showNumber(value)} ${units[index]}`;
}

function showRate(bytesPerS) {
  if (bytesPerS === null || bytesPerS === undefined) return "–";
  const units = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
  let value = bytesPerS * 8, index = 0;
  while (value >= 1000 && index < units.length - 1) { value /= 1000; index += 1; }
  return `${showNumber(value)} ${units[index]}`;
}

function showClock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

/** Seconds between ticks. */
const TICKS_S = [1, 60].flatMap(unit => [1, 2, 5, 10, 15, 30].map(each => unit * each)).concat([1, 2, 3, 6, 12, 24, 48, 96, 168, 336, 720].map(each => 3600 * each));

/** The time at a tick of an axis: with seconds, or a date, where ticks are that close or far. */
function showTick(seconds, apartS) {
  const moment = new Date(seconds * 1000), minutes = {hour: "2-digit", minute: "2-digit"};
  if (apartS >= 86400) return moment.toLocaleDateString("en-GB", {day: "numeric", month: "short"});
  return moment.toLocaleTimeString("en-GB", apartS < 60 ? {} : minutes);
}

function fill(colourText, alpha) {
  const probe = /^#(..)(..)(..)$/.exec(colourText);
  return probe ? `rgba(${probe.slice(1).map(part => parseInt(part, 16)).join(",")},${alpha})` : colourText;
}

/** A chart of curves over time, drawn anew only if its lines change; keys move its cursor, and a line reads it out. */
class TimeChart {
  constructor(box, show, height = 190) {
    this.box = box; this.show = show; this.height = height;
    this.plot = null; this.signature = "";
    this.surface = element("div", {tabindex: 0, role: "img"});
    this.readout = element("p", {class: "readout", "aria-live": "polite"});
    this.legend = element("ul", {class: "legend"});
    box.replaceChildren(this.surface, this.readout, this.legend);
    this.surface.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.plot && this.plot.setSize({width: this.surface.clientWidth, height})).observe(box);
  }

  /** `lines`: name, colour, values; optionally `low` and `high` (a band), or `fill` (stacked: top of the area). */
  draw(times, lines, summary) {
    const series = [{}], data = [times], bands = [];
    for (const line of lines) {
      if (line.low) {
        data.push(line.high, line.low);
        series.push({stroke: "transparent", points: {show: false}}, {stroke: "transparent", points: {show: false}});
        bands.push({series: [data.length - 2, data.length - 1], fill: fill(line.colour, 0.18)});
      }
      data.push(line.top || line.values);
      const few = times.length < 3;
      series.push({stroke: line.top ? undefined : line.colour, width: line.dash ? 1.2 : 1.8, dash: line.dash, spanGaps: !line.top,
        fill: line.top ? line.colour : undefined, points: {show: few, fill: line.colour}});
    }
    const signature = JSON.stringify(lines.map(line => [line.name, line.colour, Boolean(line.low), times.length < 3]));
    this.lines = lines; this.times = times;
    this.surface.setAttribute("aria-label", `${summary} Arrow keys read single points.`);
    if (this.plot && this.signature === signature) {
      this.plot.setData(data);
      return;
    }
    if (this.plot) this.plot.destroy();
    this.signature = signature;
    const axis = {stroke: colour("dim"), grid: {stroke: colour("line"), width: 1}, ticks: {stroke: colour("line"), width: 1},
      font: "11px system-ui, 'DejaVu Sans', sans-serif"};
    this.plot = new uPlot({
      width: Math.max(200, this.surface.clientWidth), height: this.height, series, bands,
      cursor: {y: false, points: {show: false}, drag: {x: true, y: false}},
      legend: {show: false},
      scales: {y: {range: (plot, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.08 : 1]}, ...this.scales},
      axes: [{...axis, size: 30, space: 84, incrs: TICKS_S, values: (plot, ticks) => ticks.map(tick => showTick(tick, ticks.length > 1 ? ticks[1] - ticks[0] : 1))},
      {...axis, size: 62, values: (plot, ticks) => ticks.map(tick => this.show(tick))}],
      hooks: {setCursor: [plot => this.read(plot.cursor.idx)]},
    }, data, this.surface);
    this.legend.replaceChildren(...lines.map(line => element("li", {}, element("i", {style: {background: line.colour}}), line.name)));
  }

  read(index) {
    if (index === null || index === undefined || this.times[index] === undefined) { this.readout.textContent = ""; return; }
    const parts = this.lines.map(line => {
      const band = line.low ? ` (${this.show(line.low[index])} to ${this.show(line.high[index])})` : "";
      return `${line.name} ${this.show(line.values[index])}${band}`;
    });
    this.readout.textContent = `${showClock(this.times[index])}: ${parts.join(", ")}`;
  }

  key(event) {
    const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9}[event.key];
    if (steps === undefined || !this.plot) return;
    event.preventDefault();
    const last = this.times.length - 1;
    this.at = Math.min(last, Math.max(0, (this.at ?? (steps > 0 ? -1 : last + 1)) + steps));
    this.plot.setCursor({left: this.plot.valToPos(this.times[this.at], "x"), top: 10});
    this.read(this.at);
  }

  forget() { this.signature = ""; }
}

/** Rank by time, coloured by the part of a step that the rank waited for others. */
function drawWaits(box, steps) {
  const {ranks, rows} = steps.waits, times = steps.times;
  if (!ranks.length || !times.length) return;
  const rowHeight = Math.max(3, Math.min(22, Math.floor(300 / ranks.length)));
  let canvas = box.querySelector("canvas");
  if (!canvas) {
    canvas = element("canvas", {class: "heat", role: "img", tabindex: 0});
    const scale = ["0 %", "25 %", "50 %", "75 % of a step and more"].map((name, index) =>
      element("li", {}, element("i", {style: {background: `rgba(${colour("heat")},${Math.max(0.06, index / 3)})`}}), name));
    box.replaceChildren(element("div", {class: "heat-box"}, element("div", {class: "heat-labels"}), canvas,
      element("div", {class: "heat-times"})), element("p", {class: "readout", "aria-live": "polite"}), element("ul", {class: "legend"}, ...scale));
    const readAt = (row, column) => {
      const data = box.shown;
      if (!data || !data.rows[row] || data.times[column] === undefined) return;
      const value = data.rows[row][column];
      box.querySelector(".readout").textContent = `${showClock(data.times[column])}: rank ${data.ranks[row]} ` +
        (value === null ? "made no step" : `waited ${value} % of a step`);
    };
    canvas.addEventListener("mousemove", event => {
      const place = canvas.getBoundingClientRect();
      readAt(Math.floor((event.clientY - place.top) / place.height * canvas.height), Math.floor((event.clientX - place.left) / place.width * canvas.width));
    });
    let at = [0, 0];
    canvas.addEventListener("keydown", event => {
      const move = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
      if (!move) return;
      event.preventDefault();
      at = [Math.min(canvas.height - 1, Math.max(0, at[0] + move[0])), Math.min(canvas.width - 1, Math.max(0, at[1] + move[1]))];
      readAt(...at);
    });
  }
  box.shown = {ranks, rows, times};
  canvas.width = times.length; canvas.height = ranks.length;
  canvas.style.height = `${rowHeight * ranks.length}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(times.length, ranks.length);
  const heat = colour("heat").split(",").map(Number);
  rows.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    image.data.set([...heat, Math.round(255 * Math.max(0.06, Math.min(1, value / 75)))], 4 * (y * times.length + x));
  }));
  context.putImageData(image, 0, 0);
  const every = Math.ceil(16 / rowHeight);
  box.querySelector(".heat-labels").replaceChildren(...ranks.filter((_, index) => index % every === 0).map((rank, index) =>
    element("span", {style: {top: `${(index * every + 0.5) * rowHeight}px`}}, rank)));
  box.querySelector(".heat-times").replaceChildren(...[times[0], times[times.length - 1]].map(time => element("span", {}, showClock(time))));
  const means = rows.map(row => { const known = row.filter(value => value !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : 0; });
  const least = means.indexOf(Math.min(...means)), most = means.indexOf(Math.max(...means));
  canvas.setAttribute("aria-label", `Wait of ${ranks.length} ranks over time, in parts of a step. Rank ${ranks[least]} waits least, ` +
    `${Math.round(means[least])} % on average; rank ${ranks[most]} most, ${Math.round(means[most])} %. Arrow keys read single cells.`);
}

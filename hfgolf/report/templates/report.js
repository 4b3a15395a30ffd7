"use strict";
// Draws the charts of a report from the JSON in #data, and reloads the page while its run lasts.

const data = JSON.parse(document.getElementById("data").textContent);
const KEY = "hfgolf:" + location.pathname;
const state = { range: null, logX: false, logY: {}, ...recall() };
const STEPS = [...Array(11).keys()].flatMap((power) => [1, 2, 2.5, 5].map((factor) => factor * 10 ** power)).filter(Number.isInteger);
let plots = [];

// What the reader has chosen survives a reload. Some browsers forbid storage on file://.
function recall() {
  try { return JSON.parse(sessionStorage.getItem(KEY)) || {}; } catch { return {}; }
}
function remember() {
  try { sessionStorage.setItem(KEY, JSON.stringify(state)); } catch { /* then a reload starts over */ }
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (number) => style(`--line-${number % 6}`);
const ink = () => style("--ink"), soft = () => style("--soft"), grid = () => style("--grid");

function short(value) {
  if (value == null) return "";
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= unit && Math.abs(value) >= 1e4) return +(value / unit).toPrecision(4) + letter;
  return String(+value.toPrecision(4));
}
const long = (value) => Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(5));

// The columns of one line: what is drawn, in the order of drawing.
function columns(line, isOnly) {
  const drawn = [], stroke = color(line.number), dash = (data.dashes[line.number] || []).map((length) => 2 * length);
  const hidden = { class: "unlisted", points: { show: false }, label: "" };
  if (line.lowest) {
    drawn.push([line.highest, { ...hidden, stroke: "transparent" }], [line.lowest, { ...hidden, stroke: "transparent" }]);
  }
  if (line.raw) drawn.push([line.raw, { ...hidden, stroke: stroke + "66", width: 1 }]);
  const isSparse = line.steps.length === 1 || (!line.isLogged && line.steps.length <= 60);
  drawn.push([line.values, {
    label: line.label,
    stroke: line.isFaint ? stroke + "80" : stroke,
    width: line.isFaint ? 1.25 : line.isLogged && !line.raw ? 1.5 : 2.25,
    dash: line.isFaint ? [] : dash,
    points: { show: isSparse, size: 6, fill: stroke, stroke },
    value: (plot, value, series, index) => {
      if (value == null) return "–";
      const step = plot.data[0][index], here = plot.data[0][plot.cursor.idx];
      return step === here || isOnly ? long(value) : `${long(value)} at ${long(step)}`;
    },
  }]);
  return drawn;
}

// The value of a line nearest to the cursor: lines have different steps.
function nearest(plot, series, index) {
  const values = plot.data[series], steps = plot.data[0];
  if (series === 0 || values[index] != null) return index;
  let left = index, right = index;
  while (left >= 0 && values[left] == null) left--;
  while (right < values.length && values[right] == null) right++;
  if (left < 0 && right >= values.length) return index;
  if (left < 0) return right;
  if (right >= values.length) return left;
  return steps[index] - steps[left] <= steps[right] - steps[index] ? left : right;
}

function drawEvents(plot) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  for (const { run, sign, steps } of data.events) {
    ctx.fillStyle = data.dashes.length > 1 ? color(run) : ink();
    for (const step of steps) {
      const x = plot.valToPos(step, "x", true);
      if (x >= bbox.left && x <= bbox.left + bbox.width) ctx.fillText(sign, x, bbox.top + bbox.height - 4 * ratio);
    }
  }
  ctx.restore();
}

function fullRange() {
  const first = Math.min(...data.charts.flatMap((chart) => chart.lines.map((line) => line.steps[0])));
  return state.logX ? [Math.max(1, first), Math.max(2, data.lastStep)] : [0, Math.max(1, data.lastStep)];
}

// The next value of the form 1, 2 or 5 times a power of ten, so that a log axis begins and ends at a label.
function round(value, towards) {
  const power = 10 ** Math.floor(Math.log10(value)), factor = value / power;
  const choices = [1, 2, 5, 10].filter((choice) => towards === Math.floor ? choice <= factor * 1.0001 : choice >= factor * 0.9999);
  return +((towards === Math.floor ? choices.at(-1) : choices[0]) * power).toPrecision(1);
}

// The range of the vertical axis: what is visible, with some room.
function verticalRange(chart, isLog) {
  return (plot, low, high) => {
    if (low == null) return [0, 1];
    if (isLog) return [round(low > 0 ? low : high / 1e4, Math.floor), round(high, Math.ceil)];
    const room = 0.06 * (high - low) || 0.06 * Math.abs(high) || 1;
    return chart.fromZero && low >= 0 ? [0, high + room] : [low - room, high + room];
  };
}

function draw(chart, holder) {
  holder.replaceChildren();
  const canLog = chart.lines.every((line) => (line.lowest || line.values).every((value) => value > 0));
  const isLog = canLog && (state.logY[chart.name] ?? chart.log);
  const tables = [], series = [{ label: "step", value: (plot, value) => value == null ? "–" : long(value) }], bands = [];
  for (const line of chart.lines) {
    const drawn = columns(line, chart.lines.length === 1);
    if (line.lowest) bands.push({ series: [series.length, series.length + 1], fill: color(line.number) + "26" });
    tables.push([line.steps, ...drawn.map(([values]) => values)]);
    series.push(...drawn.map(([, options]) => ({ spanGaps: true, ...options })));
  }
  for (const limit of chart.limits) {
    tables.push([[0, data.lastStep], [limit.value, limit.value]]);
    series.push({ label: limit.label, stroke: ink(), width: 1, dash: [3, 3], spanGaps: true, points: { show: false }, value: () => "" });
  }
  let joined = uPlot.join(tables);
  if (state.logX) joined = joined.map((column) => column.filter((_, index) => joined[0][index] > 0));
  const axis = (more) => ({
    stroke: soft, font: "12px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false },
    values: (plot, splits) => splits.map(short), ...more,
  });
  const plot = new uPlot({
    width: holder.clientWidth, height: holder.closest(".large") ? largeHeight() : 210,
    series, bands,
    scales: {
      x: { time: false, distr: state.logX ? 3 : 1, range: (plot, low, high) => low == null ? fullRange() : [low, high] },
      y: { distr: isLog ? 3 : 1, range: verticalRange(chart, isLog) },
    },
    axes: [axis({ space: 56, size: 30, incrs: STEPS }), axis({ size: 56, gap: 6, space: 36 })],
    cursor: { sync: { key: "steps", scales: ["x", null] }, dataIdx: nearest, focus: { prox: 24 }, points: { size: 7 } },
    focus: { alpha: chart.lines.length > 3 ? 0.25 : 1 },
    legend: { markers: { width: 2 } },
    hooks: { draw: [drawEvents], setScale: [noteZoom] },
  }, joined, holder);
  makeAccessible(plot);
  if (state.range) plot.setScale("x", { min: state.range[0], max: state.range[1] });
  else plot.setScale("x", { min: fullRange()[0], max: fullRange()[1] });
  plots.push(plot);
  return { canLog, isLog };
}

const largeHeight = () => innerWidth < 640 ? 260 : 380;

// A zoom of one chart is a zoom of all; a double click shows everything again.
let isZooming = false;
function noteZoom(plot, scale) {
  if (scale !== "x" || isZooming || !plots.includes(plot)) return;
  const { min, max } = plot.scales.x, [first, last] = fullRange();
  zoom(min <= first && max >= last ? null : [min, max]);
}
function zoom(range) {
  isZooming = true;
  state.range = range;
  const [min, max] = range || fullRange();
  for (const plot of plots) if (plot.scales.x.min !== min || plot.scales.x.max !== max) plot.setScale("x", { min, max });
  document.getElementById("reset").disabled = range === null;
  remember();
  setTimeout(() => { isZooming = false; });
}

// Arrow keys move the cursor, + and - zoom, 0 shows everything. A finger moves the cursor too.
function makeAccessible(plot) {
  const over = plot.over;
  over.addEventListener("dblclick", (event) => { event.stopImmediatePropagation(); zoom(null); }, true);
  over.tabIndex = 0;
  over.setAttribute("role", "application");
  over.setAttribute("aria-label", "chart: arrow keys read values, plus and minus zoom, 0 shows everything");
  over.addEventListener("keydown", (event) => {
    const last = plot.data[0].length - 1, index = plot.cursor.idx ?? 0, stride = event.shiftKey ? 10 : 1;
    const { min, max } = plot.scales.x;
    const move = { ArrowLeft: -stride, ArrowRight: stride, Home: -last, End: last }[event.key];
    const factor = { "+": 0.5, "-": 2 }[event.key];
    if (move !== undefined) {
      const step = plot.data[0][Math.max(0, Math.min(last, index + move))];
      plot.setCursor({ left: plot.valToPos(step, "x"), top: plot.bbox.height / 2 / devicePixelRatio });
    } else if (factor) {
      const middle = plot.cursor.idx == null ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
      const [first, end] = fullRange(), half = (max - min) * factor / 2;
      const range = [Math.max(first, middle - half), Math.min(end, middle + half)];
      zoom(range[0] <= first && range[1] >= end ? null : range);
    } else if (event.key === "0") zoom(null);
    else return;
    event.preventDefault();
  });
  over.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") plot.setCursor({ left: event.offsetX, top: event.offsetY });
  });
}

function drawAll() {
  plots.forEach((plot) => plot.destroy());
  plots = [];
  for (const chart of data.charts) {
    const figure = document.getElementById(`chart-${chart.name}`);
    const { canLog, isLog } = draw(chart, figure.querySelector(".plot"));
    const button = figure.querySelector("button");
    button.hidden = !canLog;
    button.textContent = isLog ? "log axis" : "linear axis";
    button.setAttribute("aria-label", `${button.textContent}; press to change`);
    button.onclick = () => { state.logY[chart.name] = !isLog; remember(); drawAll(); };
  }
  document.getElementById("log-steps").checked = state.logX;
  document.getElementById("reset").disabled = state.range === null;
}

// A page of a run that lasts reloads itself, unless nobody has rewritten it for long: then the run was killed.
function stayFresh() {
  if (!data.live) return;
  const age = Date.now() / 1000 - data.live.writtenAt, note = document.getElementById("live");
  if (age > data.live.untilSeconds) {
    note.textContent = `Last written ${Math.round(age / 60).toLocaleString("en")} minutes ago: the run has probably ended.`;
    note.classList.remove("is-live");
    return;
  }
  setTimeout(() => document.hidden ? stayFresh() : location.reload(), 1000 * data.live.everySeconds);
}

document.getElementById("controls").hidden = data.charts.length === 0;
document.getElementById("log-steps").onchange = (event) => {
  Object.assign(state, { logX: event.target.checked, range: null });
  remember();
  drawAll();
};
document.getElementById("reset").onclick = () => zoom(null);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
new ResizeObserver(() => plots.forEach((plot) => {
  const holder = plot.root.parentElement;
  if (holder.clientWidth !== plot.width) plot.setSize({ width: holder.clientWidth, height: plot.height });
})).observe(document.querySelector("main"));
drawAll();
stayFresh();

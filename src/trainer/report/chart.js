// Draws what the report is made of: elements, texts of numbers, charts with tips, and bars. Texts of runs come into the
// page as text nodes alone, never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs.map((run, index) =>
  ({...run, index, shown: true, config: run.config || {}, notes: run.notes || {}}));
const single = runs.length === 1;
const redraws = [];  // functions that draw what depends on the width, the x axis or the shown runs
let xIsSeconds = false, lit = -1;  // lit: the run whose lines stand out; -1: none

// These make elements.
function add(parent, node, attributes, ...children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity));
  if (parent) parent.append(node);
  return node;
}
const el = (tag, attributes, ...children) => add(null, document.createElement(tag), attributes, ...children);
const draw = (parent, tag, attributes, ...children) =>
  add(parent, document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, ...children);
const colour = index => `var(--c${index % 8})`;
const swatch = index => el("span", {class: "swatch", style: `background:${colour(index)}`});

// These make texts of numbers.
const known = value => typeof value === "number" && isFinite(value);
function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(4));
}
const percent = value => (known(value) ? `${(100 * value).toFixed(1)} %` : "–");
function scaled(value, units, base) {
  if (!known(value)) return "–";
  let unit = 0;
  for (; unit + 1 < units.length && Math.abs(value) >= base; ++unit) value /= base;
  return `${+value.toPrecision(3)} ${units[unit]}`;
}
const bytes = value => scaled(value, ["B", "kB", "MB", "GB", "TB"], 1000);
const seconds = value =>
  known(value) && value > 0 && value < 1 ? scaled(value * 1e6, ["µs", "ms"], 1000) : scaled(value, ["s"], 1);
const sum = values => values.reduce((all, value) => all + value, 0);
const mean = values => sum(values) / values.length;
const max = values => values.reduce((most, value) => (value > most ? value : most), -Infinity);

// Makes a picture that paint(picture, width) draws; it gives the height.
function figure(label, paint) {
  const picture = draw(null, "svg", {role: "img", "aria-label": label});
  redraws.push(() => {
    const width = Math.max(280, picture.clientWidth || 400);
    picture.replaceChildren();
    const height = paint(picture, width);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("height", height);
  });
  return picture;
}
const box = (picture, x, y, width, height, fill, title = "", opacity = 1) =>
  draw(picture, "rect", {x, y, width: Math.max(0, width), height, fill, opacity}, draw(null, "title", {}, title));
const write = (picture, x, y, text, more) => draw(picture, "text", {x, y, ...more}, text);

// The tip shows values at the pointer, or at the keyboard's place.
const tip = document.getElementById("tip");
function showTip(x, y, title, rows) {
  tip.replaceChildren(el("b", {}, title), ...rows.map(([mark, name, value]) =>
    el("div", {}, el("span", {}, mark === null ? "" : swatch(mark), name), el("span", {}, value))));
  tip.hidden = false;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(4, y + 14 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 14)}px`;
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, true);

// Gives round marks on an axis.
function ticks(low, high, isLog, most) {
  const marks = [];
  if (isLog) {
    const decades = Math.log10(high / low);
    const steps = decades > 3 ? [1] : decades > 1 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    const skip = Math.max(1, Math.ceil(decades / most));
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += skip)
      for (const step of steps) marks.push(step * 10 ** power);
  } else {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; ++at) marks.push(at * step);
  }
  return marks.filter(mark => mark >= low * (1 - 1e-9) && mark <= high * (1 + 1e-9) || mark === 0);
}

// A line has {name, run, colour, dash, xs, ys}. The chart draws all lines whose run is shown.
function chart(title, lines, options = {}) {
  const format = options.format || number, height = 240, label = `${title}; arrow keys show values`;
  const picture = draw(null, "svg", {height, tabindex: 0, role: "img", "aria-label": label});
  let logY = Boolean(options.logY), place = null;
  const log = el("button", {type: "button", "aria-pressed": logY, onclick: () => {
    logY = !logY;
    log.setAttribute("aria-pressed", logY);
    redraw();
  }}, "log");
  const legend = el("div", {class: "legend"});
  const named = new Map(lines.filter(line => line.legend).map(line => [line.legend, line]));
  for (const [name, line] of named.size > 1 && named.size <= 24 ? named : []) {
    const key = draw(null, "svg", {viewBox: "0 0 26 10", "aria-hidden": true});
    draw(key, "path", {d: "M0 5H26", "stroke-width": 2.5, stroke: line.colour, "stroke-dasharray": line.dash});
    legend.append(el("span", {}, key, name));
  }

  function redraw() {
    place = null;
    const width = Math.max(240, picture.clientWidth || 400), left = 58, right = 16, top = 10, bottom = 34;
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren();
    const good = value => known(value) && (!logY || value > 0);
    const shown = lines.filter(line => line.run === undefined || runs[line.run].shown)
      .map(line => ({...line, at: options.x ? line.xs : xIsSeconds ? line.seconds : line.xs}));
    const xs = shown.flatMap(line => line.at), ys = shown.flatMap(line => line.ys.filter(good));
    if (!ys.length) return void write(picture, width / 2, height / 2, "no finite values", {"text-anchor": "middle"});
    let [x0, x1] = [-max(xs.map(x => -x)), max(xs)], [y0, y1] = [-max(ys.map(y => -y)), max(ys)];
    if (x0 === x1) options.logX ? (x0 /= 2, x1 *= 2) : (x0 -= 0.5, x1 += 0.5);
    if (options.zero && !logY) y0 = Math.min(0, y0);
    if (options.one && y1 > 0.5 && !logY) y1 = Math.max(1, y1);
    const room = logY ? Math.max(1.02, (y1 / y0) ** 0.04) : (y1 - y0 || Math.abs(y1) || 1) * 0.04;
    if (logY) (y0 /= room, y1 *= room);
    else (y0 = y0 === 0 && options.zero ? 0 : y0 - room, y1 = options.one && y1 === 1 ? 1 : y1 + room);
    const part = (value, low, high, isLog) =>
      isLog ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const toX = x => left + part(x, x0, x1, options.logX) * (width - left - right);
    const toY = y => height - bottom - part(y, y0, y1, logY) * (height - top - bottom);
    for (const y of ticks(y0, y1, logY, 5)) {
      draw(picture, "line", {class: "rule", x1: left, x2: width - right, y1: toY(y), y2: toY(y)});
      write(picture, left - 6, toY(y) + 4, format(y), {"text-anchor": "end"});
    }
    const isWhole = !options.x && !xIsSeconds;  // an epoch's number
    for (const x of ticks(x0, x1, options.logX, width > 500 ? 8 : 5).filter(x => !isWhole || x % 1 === 0))
      write(picture, toX(x), height - bottom + 16, number(x), {"text-anchor": "middle"});
    const axis = options.x || (xIsSeconds ? "seconds of training" : "epoch");
    write(picture, (left + width - right) / 2, height - 3, axis, {"text-anchor": "middle"});
    for (const line of shown) {
      let path = "", pen = "M";
      line.ys.forEach((y, i) => {
        if (!good(y)) return void (pen = "M");
        path += `${pen}${toX(line.at[i]).toFixed(1)} ${toY(y).toFixed(1)}`;
        pen = "L";
      });
      const look = {"data-run": line.run, opacity: lit < 0 || lit === line.run ? 1 : 0.12};
      draw(picture, "path", {...look, d: path, fill: "none", stroke: line.colour, "stroke-dasharray": line.dash,
        "stroke-width": line.ys.length > 300 ? 1.2 : 2});
      if (line.ys.length > 40) continue;
      line.ys.forEach((y, i) =>
        good(y) && draw(picture, "circle", {...look, cx: toX(line.at[i]), cy: toY(y), r: 2.5, fill: line.colour}));
    }
    const cursor = draw(picture, "line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
    const longest = shown.reduce((a, b) => (b.at.length > a.at.length ? b : a));
    const hide = () => cursor.setAttribute("visibility", "hidden");
    place = {width, at: longest.at, toX, hide, show(index, clientX, clientY, wantedY) {
      const x = longest.at[index], rows = shown.map(line => {
        let low = 0, high = line.at.length - 1;  // of a line's ascending x, searches the nearest
        while (high - low > 1) line.at[(low + high) >> 1] <= x ? low = (low + high) >> 1 : high = (low + high) >> 1;
        const i = Math.abs(line.at[high] - x) < Math.abs(line.at[low] - x) ? high : low;
        return {line, y: line.ys[i], near: known(line.ys[i]) ? Math.abs(toY(line.ys[i]) - (wantedY ?? 0)) : Infinity};
      });
      const nearest = [...rows].sort((a, b) => a.near - b.near).slice(0, 12).sort((a, b) => b.y - a.y);
      add(null, cursor, {visibility: "visible", x1: toX(x), x2: toX(x)});
      const more = rows.length > nearest.length ? [[null, `and ${rows.length - nearest.length} more`, ""]] : [];
      showTip(clientX, clientY, `${axis} ${number(x)}`,
        [...nearest.map(row => [row.line.mark, row.line.name, format(row.y)]), ...more]);
    }};
  }

  let index = 0;
  picture.addEventListener("pointermove", event => {
    if (!place) return;
    const area = picture.getBoundingClientRect(), x = (event.clientX - area.left) * place.width / area.width;
    index = place.at.reduce((best, at, i, all) =>
      Math.abs(place.toX(at) - x) < Math.abs(place.toX(all[best]) - x) ? i : best, 0);
    place.show(index, event.clientX, event.clientY, (event.clientY - area.top) * height / area.height);
  });
  const leave = () => { hideTip(); if (place) place.hide(); };
  for (const name of ["pointerleave", "blur"]) picture.addEventListener(name, leave);
  picture.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity}[event.key];
    if (event.key === "Escape") leave();
    if (!step || !place) return;
    event.preventDefault();
    index = Math.max(0, Math.min(place.at.length - 1, index + step));
    const area = picture.getBoundingClientRect();
    place.show(index, area.left + place.toX(place.at[index]) * area.width / place.width, area.top + 20);
  });
  redraws.push(redraw);
  return el("div", {class: "card"}, el("div", {class: "head"}, el("h3", {}, title), log), picture, legend);
}

// Makes the report of the page's data: its sections, one after the other.

// Makes the lines of a measure, for each run one or more, such as train and test.
function linesOf(parts) {
  return runs.flatMap(run => parts.map(([part, valueOf, dash], p) => {
    const ys = run.metrics.map(epoch => valueOf(epoch, run) ?? null);
    const mark = single ? p : run.index;
    const name = single ? part || run.name : [run.name, part].filter(Boolean).join(", ");
    const xs = run.metrics.map(epoch => epoch.epoch);
    return {name, legend: name, run: run.index, mark, colour: colour(mark), dash, ys, xs, seconds: run.seconds};
  })).filter(line => line.ys.some(known));
}
for (const run of runs) {
  let all = 0;
  run.seconds = run.metrics.map(epoch => (all += epoch.seconds ?? 0));
}
const waitOfRanks = epoch => {
  const waits = epoch.ranks && epoch.ranks.rank_wait.filter(known);
  return waits && waits.length && epoch.seconds > 0 ? max(waits) / epoch.seconds : null;
};
const memoryOf = epoch => (epoch.ranks && max(epoch.ranks.memory) > 0 ? max(epoch.ranks.memory) : null);

function charts() {
  const dash = "7 4";
  const tests = [...new Set(runs.flatMap(run => run.metrics.flatMap(epoch => Object.keys(epoch.test || {}))))];
  const kinds = [
    ["Loss", [["train", epoch => epoch.train_loss], ["test", epoch => epoch.test && epoch.test.loss, dash]], {}],
    ["Accuracy", [["train", epoch => epoch.train_accuracy], ["test", epoch => epoch.test_accuracy, dash]], {one: true}],
    ...tests.filter(name => name !== "loss").map(name => [`Test ${name}`, [["", epoch => epoch.test?.[name]]], {}]),
    ["Learning rate", [["", epoch => epoch.lr]], {zero: true, mayBeLine: true}],
    ["Seconds per epoch", [["", epoch => epoch.seconds]], {zero: true, format: seconds}],
    ["Waiting for ranks, the longest", [["", waitOfRanks]], {zero: true, format: percent, mayBeLine: true}],
    ["Waiting for data, the longest", [["", epoch => epoch.data_wait]], {zero: true, format: percent, mayBeLine: true}],
    ["Peak memory, the highest", [["", memoryOf]], {zero: true, format: bytes, mayBeLine: true}],
    ["Bytes per step, the most", [["", epoch => epoch.bytes_per_step]], {zero: true, format: bytes, mayBeLine: true}],
  ];
  const cards = [], constant = [];
  for (const [title, parts, options] of kinds) {
    const lines = linesOf(parts);
    const values = [...new Set(lines.flatMap(line => line.ys.filter(known)))];
    if (!values.length || (values.length === 1 && values[0] === 0)) continue;
    const isLevel = options.mayBeLine && values.length === 1;
    if (isLevel) constant.push(`${title.split(",")[0]}: ${(options.format || number)(values[0])}`);
    else cards.push(chart(title, lines, options));
  }
  const axis = el("select", {"aria-label": "horizontal axis", onchange: () => {
    xIsSeconds = axis.value === "seconds";
    redrawAll();
  }}, el("option", {value: "epoch"}, "over epochs"), el("option", {value: "seconds"}, "over seconds of training"));
  return [el("div", {class: "head"}, el("h2", {}, "Curves"), axis), el("div", {class: "grid"}, cards),
    constant.length ? el("p", {class: "soft"}, `In every epoch the same. ${constant.join("; ")}`) : ""];
}

// Settings: each has its group, key, default and a text per run.
function textOf(value) {
  if (Array.isArray(value)) return value.join(",");
  if (value === null || typeof value !== "object") return String(value);
  const {mesh, ...rest} = value;  // a split
  const others = Object.entries(rest).filter(([, part]) => String(part)).map(([key, part]) => `${key} ${part}`);
  return [mesh ? `${mesh.data} x ${mesh.pipeline} x ${mesh.tensor}` : "", ...others].join("; ");
}
const brief = text => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
const settings = data.settings.map(([group, key, otherwise]) => {
  const texts = runs.map(run => {
    const value = (run.config.way && run.config.way[key]) ?? run.config[key];
    return value === undefined ? otherwise : textOf(value);
  });
  return {group, key, texts, differs: new Set(texts).size > 1, isSet: texts.some(text => text !== otherwise)};
});

function measureOf(run) {
  const counted = run.metrics.some(epoch => known(epoch.test_accuracy));
  const {by, more_is_better: more} = run.notes.best ?? {by: counted ? "accuracy" : "loss", more_is_better: counted};
  const name = by === "loss" && run.metrics.at(-1)?.test?.perplexity ? "perplexity" : by;
  const values = run.metrics.map(epoch => name === "accuracy" ? epoch.test_accuracy : epoch.test && epoch.test[name]);
  let best = -1;
  values.forEach((value, i) => {
    if (known(value) && (best < 0 || (more ? value > values[best] : value < values[best]))) best = i;
  });
  return {name, more, last: values.at(-1), best: values[best], bestEpoch: run.metrics[best]?.epoch ?? ""};
}
function factsOf(run) {
  const last = run.metrics.at(-1) || {}, measure = measureOf(run), all = run.seconds.at(-1);
  const share = valueOf => sum(run.metrics.map(epoch => (valueOf(epoch) ?? NaN) * epoch.seconds)) / all;
  return [
    [`test ${measure.name}`, number(measure.last), measure.more ? measure.last : -measure.last],
    ["best", `${number(measure.best)} (epoch ${measure.bestEpoch})`],
    ["train loss", number(last.train_loss)],
    ["epochs", String(run.metrics.length)],
    ["per epoch", seconds(all / run.metrics.length), -all / run.metrics.length],
    ["waiting for ranks", percent(share(waitOfRanks))],
    ["waiting for data", percent(share(epoch => epoch.data_wait))],
    ["peak memory", bytes(memoryOf(last))],
    ["weights", last.weights || "–"],
  ];
}

function overview() {
  if (single) {
    const tile = ([name, value]) => el("div", {class: "tile"}, el("span", {class: "soft"}, name),
      el("b", {class: value.length > 12 ? "long" : false}, value));
    return [el("p", {class: "soft"}, runs[0].notes.title || runs[0].config.model || ""),
      el("div", {class: "tiles"}, factsOf(runs[0]).filter(fact => fact[0] !== "epochs").map(tile))];
  }
  const differing = settings.filter(setting => setting.differs).slice(0, 6);
  const light = index => () => {
    lit = index;
    for (const part of document.querySelectorAll("[data-run]"))
      part.setAttribute("opacity", lit < 0 || lit === Number(part.dataset.run) ? 1 : 0.12);
  };
  const facts = runs.map(factsOf), leads = facts[0].map((_, i) => max(facts.map(own => own[i][2] ?? -Infinity)));
  const head = ["run", ...differing.map(setting => setting.key), ...facts[0].map(fact => fact[0])];
  return [el("p", {class: "soft"}, "The settings that differ come first. A box takes a run out of the curves."),
    el("div", {class: "card wide"}, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name, i) => el("th", {class: i ? "number" : false, scope: "col"}, name)))),
      el("tbody", {}, runs.map(run => el("tr", {onpointerenter: light(run.index), onpointerleave: light(-1)},
        el("th", {scope: "row"}, el("label", {}, el("input", {type: "checkbox", checked: "", onchange: event => {
          run.shown = event.target.checked;
          redrawAll();
        }}), " ", swatch(run.index), run.name)),
        differing.map(({texts}) => el("td", {class: "number", title: texts[run.index]}, brief(texts[run.index]))),
        facts[run.index].map(([, value, score], i) =>
          el("td", {class: score === leads[i] ? "number leads" : "number"}, value)))))))];
}

function warnings() {
  const texts = runs.flatMap(({name, notes: {warnings, straggler, end}}) =>
    [...(warnings || []), straggler, end && `It ended early: ${end}`].filter(Boolean)
      .map(text => (single ? text : `${name}: ${text}`)));
  if (!texts.length) return [];
  const list = el("ul", {}, texts.map(text => el("li", {}, text)));
  return [el("div", {class: "card warnings"}, el("h3", {}, "Warnings"), list)];
}

// Makes a part of the report with a card per run, which is open if there is one alone.
const fold = (isOpen, names, ...parts) =>
  el("details", {class: "card", open: isOpen && "", ontoggle: () => redrawAll()}, el("summary", {}, names), parts);
function section(title, list, make, keyOf, ...before) {
  if (!list.length) return [];
  const alike = new Map();  // of runs that look alike here one is shown
  for (const run of list) alike.set(keyOf(run), [...(alike.get(keyOf(run)) || []), run]);
  const nameOf = run => el("span", {}, single ? "" : swatch(run.index), run.name, " ");
  const cards = [...alike.values()].map(same => fold(alike.size === 1, same.map(nameOf), make(same[0])));
  const folded = cards.length > 6 ? [fold(false, `${cards.length} one by one`, cards)] : cards;
  return [el("h2", {}, title), ...before, ...folded];
}

function settingsTable() {
  const body = el("tbody", {}), all = el("input", {type: "checkbox", onchange: () => fill()});
  function fill() {
    body.replaceChildren();
    let group = "";
    for (const setting of settings.filter(setting => all.checked || setting.differs || setting.isSet)) {
      if (setting.group !== group)
        body.append(el("tr", {}, el("th", {colspan: runs.length + 1, scope: "colgroup"}, setting.group)));
      group = setting.group;
      body.append(el("tr", {class: setting.differs ? "differs" : false},
        el("td", {}, el("code", {}, setting.key), setting.differs ? " ●" : ""),
        setting.texts.map(text => el("td", {}, text || "–"))));
    }
  }
  fill();
  const names = runs.map(run => el("th", {scope: "col"}, swatch(run.index), run.name));
  const head = [el("caption", {}, "● differs between the runs"), el("thead", {}, el("tr", {}, el("th", {}), names))];
  return [el("div", {class: "head"}, el("h2", {}, "Settings"), el("label", {}, all, " those of the defaults too")),
    el("div", {class: "card wide"}, el("table", {}, single ? [] : head, body))];
}

function extraCharts() {
  const lineOf = ({name, points}, i) => ({name, legend: name, mark: i, colour: colour(i),
    dash: ["", "7 4", "2 3"][Math.floor(i / 8) % 3], xs: points.map(([x]) => x), ys: points.map(([, y]) => y)});
  const card = ({title, lines, x, log_x: logX, log_y: logY, one}) =>
    chart(title, lines.map(lineOf), {x, logX, logY, one});
  return data.charts.length ? [el("div", {class: "grid", style: "margin-top:12px"}, data.charts.map(card))] : [];
}
const redrawAll = () => redraws.forEach(redraw => redraw());
const title = data.title || (single ? runs[0].name : `${runs.length} runs`);
document.title = `${title} – lockstep report`;
const page = document.getElementById("report");
page.replaceChildren(el("h1", {}, title));
const whole = runs.length ? [overview, warnings, extraCharts, charts, times,
  () => section("Which rank has what", runs.filter(run => run.notes.tensors && run.notes.split), split,
    ({notes: {tensors, split, samples, ranks}, metrics}) =>
      JSON.stringify([tensors, split, samples, ranks, metrics.at(-1)?.parts])),
  () => section("A step", runs.filter(run => run.notes.timeline), timeline, run => run.index),
  settingsTable] : [extraCharts];
for (const part of whole) page.append(...part());
redrawAll();
let width = innerWidth;
addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), redrawAll()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

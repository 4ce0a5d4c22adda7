// Draws what the ranks of a run do: where their time goes, which of them has what, and a step's timeline.

const kRow = 20;  // the height of a row
const namesOf = run => run.notes.ranks || (run.metrics[0]?.ranks?.memory || []).map((_, rank) => `rank ${rank}`);

// Draws rows of parts side by side: {name, parts: [[seconds, colour, text], …], text}.
function bars(rows) {
  return figure(rows.map(row => `${row.name}: ${row.text}`).join("; "), (picture, width) => {
    const isWide = width > 600, left = isWide ? 150 : 96, right = isWide ? 260 : 76;
    const most = max(rows.map(row => row.parts.reduce((sum, part) => sum + part[0], 0))) || 1;
    rows.forEach((row, i) => {
      write(picture, 0, kRow * i + 14, row.name.slice(0, left / 6.6));
      let x = left;
      for (const [value, fill, text] of row.parts) {
        const length = value / most * (width - left - right);
        box(picture, x, kRow * i + 3, length, kRow - 6, fill, `${row.name}: ${text} ${seconds(value)}`);
        x += length;
      }
      write(picture, x + 6, kRow * i + 14, isWide ? row.text : row.text.split(";")[0]);
    });
    return kRow * rows.length;
  });
}

// Gives a rank's mean seconds per epoch, or with rank -1 those of all ranks.
function timeOf(run, rank) {
  const epochs = run.metrics.filter(epoch => epoch.ranks);
  const ofRank = values => (rank < 0 ? mean(values.map(value => value ?? NaN)) : values[rank] ?? NaN);
  const all = mean(epochs.map(epoch => epoch.seconds)), data = mean(epochs.map(epoch => ofRank(epoch.ranks.data_wait)));
  const others = mean(epochs.map(epoch => ofRank(epoch.ranks.rank_wait)));
  const isKnown = known(others), memory = rank < 0 ? 0 : epochs.at(-1).ranks.memory[rank];
  const shares = [isKnown && `ranks ${percent(others / all)}`, `data ${percent(data / all)}`, memory && bytes(memory)];
  return {
    parts: [
      [Math.max(0, all - data - (isKnown ? others : 0)), colour(0), `computing${isKnown ? "" : ", waiting for ranks"}`],
      [isKnown ? others : 0, colour(1), "waiting for ranks"],
      [data, colour(4), "waiting for data"],
    ],
    text: `${seconds(all)}; ${shares.filter(Boolean).join(", ")}`,
  };
}

// Draws for each rank (down) and epoch (across) the share of time in which it waited for others.
function heat(run) {
  const epochs = run.metrics.filter(epoch => epoch.ranks), count = epochs[0].ranks.rank_wait.length;
  const valueAt = (epoch, rank) => epochs[epoch].ranks.rank_wait[rank] / epochs[epoch].seconds;
  const most = max(epochs.flatMap(epoch => epoch.ranks.rank_wait.map(wait => wait / epoch.seconds))) || 1;
  const columns = Math.min(epochs.length, 1000), height = Math.max(40, Math.min(12 * count, 520));
  const picture = el("canvas", {width: columns, height: count, style: `height:${height}px`, role: "img", tabindex: 0,
    "aria-label": "share of time that each rank waited for others, by epoch; arrow keys show values"});
  redraws.push(() => {
    const context = picture.getContext("2d");
    context.fillStyle = getComputedStyle(document.body).getPropertyValue("--c1").trim();
    context.clearRect(0, 0, columns, count);
    for (let column = 0; column < columns; ++column) {
      const epoch = Math.floor(column * epochs.length / columns);
      for (let rank = 0; rank < count; ++rank) {
        context.globalAlpha = Math.min(1, Math.max(0, valueAt(epoch, rank) / most));
        context.fillRect(column, rank, 1, 1);
      }
    }
  });
  const within = (place, all) => Math.max(0, Math.min(all - 1, Math.floor(place)));
  let epoch = 0, rank = 0;
  const show = (x, y) => showTip(x, y, `epoch ${epochs[epoch].epoch}`,
    [[null, namesOf(run)[rank], `waited ${percent(valueAt(epoch, rank))}`]]);
  picture.addEventListener("pointermove", event => {
    const area = picture.getBoundingClientRect();
    epoch = within((event.clientX - area.left) / area.width * epochs.length, epochs.length);
    rank = within((event.clientY - area.top) / area.height * count, count);
    show(event.clientX, event.clientY);
  });
  picture.addEventListener("keydown", event => {
    const step = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]}[event.key];
    if (event.key === "Escape") hideTip();
    if (!step) return;
    event.preventDefault();
    [epoch, rank] = [within(epoch + step[0], epochs.length), within(rank + step[1], count)];
    const area = picture.getBoundingClientRect();
    show(area.left + (epoch + 0.5) / epochs.length * area.width, area.top + (rank + 0.5) / count * area.height);
  });
  for (const name of ["pointerleave", "blur"]) picture.addEventListener(name, hideTip);
  return el("div", {}, el("p", {class: "soft"}, "Waiting for other ranks: ranks from top to bottom, epochs from left ",
    `to right; the strongest colour is ${percent(most)}.`), picture);
}

function times() {
  const list = runs.filter(run => run.metrics.some(epoch => epoch.ranks));
  const legend = el("p", {class: "soft"}, "Seconds per epoch, mean: ", swatch(0), "computing ", swatch(1),
    "waiting for other ranks ", swatch(4), "waiting for data");
  const ofAll = single ? "" : el("div", {class: "card"}, bars(list.map(run => ({name: run.name, ...timeOf(run, -1)}))));
  return section("Where the time goes", list, run => {
    const names = namesOf(run), isMeasured = run.metrics.some(epoch => epoch.ranks?.rank_wait.some(known));
    return [el("div", {class: "scroll"}, bars(names.map((name, rank) => ({name, ...timeOf(run, rank)})))),
      names.length > 1 && isMeasured && run.metrics.length > 1 ? heat(run) : ""];
  }, run => run.index, legend, ofAll);
}

// Gives the tensors of a text of notes.json by their names.
const tensorsIn = text => new Map(text.split("\n").filter(Boolean).map(line => {
  const words = line.split(" "), sizes = [];
  while (words.length > 1 && /^\d+$/.test(words[words.length - 1])) sizes.unshift(+words.pop());
  return [words.join(" "), sizes];
}));
const volume = sizes => sizes.reduce((product, size) => product * size, 1);

// Gives the tensors of each layer, by the layers' names.
function layersOf(held) {
  const layers = new Map();
  for (const name of new Set(held.flatMap(tensors => [...tensors.keys()]))) {
    const layer = name.includes(".") ? name.slice(0, name.lastIndexOf(".")) : name;
    layers.set(layer, [...(layers.get(layer) || []), name]);
  }
  const isNumbered = [...layers.keys()].every(name => /^\d/.test(name));
  return isNumbered ? [...layers].sort((a, b) => a[0].localeCompare(b[0], "en", {numeric: true})) : [...layers];
}

function split(run) {
  const {ranks: names, tensors: texts, samples, split: {mesh, schedule, microbatches}} = run.notes;
  const zero = Number(run.config.way?.zero_stage || 0), held = texts.map(tensorsIn), layers = layersOf(held);
  const parts = run.metrics.at(-1)?.parts || samples, batch = sum(parts);
  const picture = figure(`which of ${names.length} ranks has which of ${layers.length} layers`, (picture, width) => {
    const isSmall = width < 600, left = isSmall ? 84 : 130, batchWidth = isSmall ? 60 : 150;
    const first = left + batchWidth + 12;
    const cell = (width - first) / layers.length, inner = cell - (cell > 6 ? 2 : 0.5), hasNames = cell >= 11;
    const top = hasNames ? Math.min(130, 12 + 5.2 * max(layers.map(([name]) => name.length))) : 20;
    const row = names.length > 16 ? 14 : kRow;
    write(picture, left, top - 6, isSmall ? "samples" : `samples of a batch of ${batch}`);
    if (!hasNames) write(picture, first, top - 6, `${layers.length} layers`);
    layers.forEach(([name], i) => hasNames && write(picture, 0, 0, name.slice(0, 24),
      {transform: `translate(${first + cell * (i + 0.5) + 3} ${top - 5}) rotate(-60)`}));
    names.forEach((name, rank) => {
      const y = top + row * rank, replica = Math.floor(rank / (mesh.pipeline * mesh.tensor));
      const before = sum(parts.slice(0, replica)), own = parts[replica] ?? 0, mine = held[held.length === 1 ? 0 : rank];
      write(picture, 0, y + row - 5, name.slice(0, left / 6.6));
      box(picture, left, y + 2, batchWidth, row - 4, "var(--line)");
      box(picture, left + before / batch * batchWidth, y + 2, own / batch * batchWidth, row - 4, colour(0),
        `${name}: ${own} of ${batch} samples`);
      layers.forEach(([, all], i) => {
        const tensors = all.filter(tensor => mine.has(tensor)), x = first + cell * i;
        const whole = tensor => run.shapes[tensor] || mine.get(tensor);
        const isSlice = held.length > 1 && !zero &&
          sum(tensors.map(tensor => volume(mine.get(tensor)))) < sum(tensors.map(tensor => volume(whole(tensor))));
        const sizes = tensor => (isSlice ? `${mine.get(tensor).join("x")} of ` : "") + whole(tensor).join("x");
        box(picture, x, y + 2, inner, row - 4, "var(--line)");
        if (!tensors.length) return;
        const length = isSlice ? inner / mesh.tensor : inner, begin = isSlice ? x + rank % mesh.tensor * length : x;
        box(picture, begin, y + 2, length, row - 4, colour(2),
          `${name}: ${tensors.map(tensor => `${tensor} ${sizes(tensor)}`).join(", ")}`);
      });
    });
    return top + row * names.length + 4;
  });
  const kept = ["", "", "gradients and ", "parameters, gradients and "][zero];
  return [el("p", {class: "soft"}, `${mesh.data} x ${mesh.pipeline} x ${mesh.tensor} (data x pipeline x tensor)`,
    mesh.pipeline > 1 ? `, ${schedule}, ${microbatches} microbatches` : "",
    zero ? `; of ${kept}the optimizer's state each rank keeps its slice (ZeRO, stage ${zero})` : "",
    ". A column is a layer with parameters; a part of a cell is a slice of its channels."),
  el("div", {class: "scroll"}, picture)];
}

// Gives the seconds that intervals cover together.
function covered(intervals) {
  let all = 0, end = -Infinity;
  for (const [from, to] of [...intervals].sort((a, b) => a[0] - b[0])) {
    all += Math.max(0, to - Math.max(from, end));
    end = Math.max(end, to);
  }
  return all;
}

function timeline(run) {
  const {seconds: end, ranks: byRank} = run.notes.timeline, ranks = Object.entries(byRank);
  const isSent = event => event[0].startsWith("bucket");
  const spans = events => events.map(([, begin, length]) => [begin, begin + length]);
  const exchanges = ranks.map(([, events]) => {
    const sent = spans(events.filter(isSent)), work = spans(events.filter(event => !isSent(event)));
    return {all: covered(sent), beside: covered(sent) + covered(work) - covered([...sent, ...work])};
  });
  const all = mean(exchanges.map(exchange => exchange.all)), beside = mean(exchanges.map(exchange => exchange.beside));
  const fills = {forward: colour(0), backward: colour(1), update: colour(2)};
  const picture = figure(`a step's timeline of ${ranks.length} ranks`, (picture, width) => {
    const left = width < 600 ? 84 : 130, row = ranks.length > 16 ? 18 : 30, lane = row / 2 - 2;
    const bottom = row * ranks.length;
    const toX = time => left + Math.min(time, end) / end * (width - left - 24);
    for (const time of ticks(0, end, false, width > 600 ? 8 : 4)) {
      draw(picture, "line", {class: "rule", x1: toX(time), x2: toX(time), y1: 0, y2: bottom + 4});
      write(picture, toX(time), bottom + 18, time ? seconds(time) : "0", {"text-anchor": "middle"});
    }
    ranks.forEach(([rank, events], i) => {
      write(picture, 0, row * (i + 0.5) + 4, (namesOf(run)[rank] || `rank ${rank}`).slice(0, left / 6.6));
      for (const event of events) {
        const [name, begin, length] = event, x = toX(begin);
        box(picture, x, row * i + (isSent(event) ? lane + 2 : 1), Math.max(1, toX(begin + length) - x), lane,
          fills[name] || colour(3), `${name}: from ${seconds(begin)}, for ${seconds(length)}`, isSent(event) ? 0.7 : 1);
      }
    });
    return bottom + 24;
  });
  const overlap = `Of ${seconds(all)} of exchange, ${percent(beside / all)} lay beside forward, backward and update ` +
    "(mean of the ranks). A backward may end with the wait for its last bucket.";
  return [el("p", {class: "soft"}, swatch(0), "forward ", swatch(1), "backward ", swatch(2), "update ", swatch(3),
    "exchange of a bucket of gradients"),
  el("p", {}, `The step took ${seconds(end)}. `, all > 0 ? overlap : "No bucket of gradients was exchanged."),
  el("div", {class: "scroll"}, picture)];
}

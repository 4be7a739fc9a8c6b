// Draw the two plots: the curves over the stream, and quality against cost.

const LAYOUT = {
  margin: { l: 60, r: 12, t: 8, b: 48 }, paper_bgcolor: "white", plot_bgcolor: "white", hovermode: "closest",
  font: { family: "system-ui, sans-serif", size: 12, color: "#1c2430" }, showlegend: true,
  legend: { orientation: "h", xref: "container", yref: "container", x: 0, y: 0, yanchor: "bottom", itemclick: false },
};
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const GRID = "#e8ebef", INK = "#1c2430";
// Maximum number of curves, and number of markers on a curve with many points.
const MAX_CURVES = 8, MARKERS_PER_CURVE = 8;
// If there are at most this many points, they have error bars.
const FEW_POINTS = 200;
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "triangle-left",
  "triangle-right", "star", "hexagon"];

// Escape text, because Plotly interprets some HTML tags in names and hover texts.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Break a text into lines that are short enough for a narrow screen.
const wrapped = (text) => {
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1).length + word.length > 40) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) ? " " : ""}${word}`;
  }
  return lines.map(escaped).join("<br>");
};

// Return the layout of an axis. It is logarithmic if the largest value is at least three times the smallest; the title
// then says so.
const axis = (title, values) => {
  const positive = values.filter((value) => Number.isFinite(value) && value > 0);
  const low = Math.min(...positive), high = Math.max(...positive), isLog = positive.length > 0 && high / low >= 3;
  const settings = { gridcolor: GRID, zeroline: false, automargin: true, nticks: 7, tickangle: 0 };
  if (!isLog) {
    // Ticks have three significant digits. If all values are almost equal, widen the axis, so that ticks differ.
    const range = high > 0 && high / low < 1.05 ? [0.9 * low, 1.1 * high] : undefined;
    return { ...settings, title: { text: wrapped(title) }, tickformat: high >= 1000 ? ".3~s" : ".3~r", range };
  }
  // Ticks at 1, 2, 3, 4, ..., at 1, 2, 5, 10, ..., or at powers of ten, as many as can be read.
  const dtick = high / low > 1e4 ? 1 : high / low > 8 ? "D2" : "D1";
  return { ...settings, title: { text: wrapped(`${title}, logarithmic`) }, type: "log", dtick, tickformat: ".3~s" };
};

// Put a summary of a plot where screen readers find it.
const describe = (id, text) => byId(id).setAttribute("aria-label", text);

// The name of a group in a legend: the best and the chosen one in bold.
const legendName = (index) => {
  const text = wrapped(comparison.groups[index].label);
  return index === best || index === chosen ? `<b>${text}</b>` : text;
};

// ---- the curves
// Return a symbol for each group, so that no two curves have the same colour and symbol: index -> symbol. The first curve
// of a colour has the symbol of its learner. Open symbols follow when all are used.
const symbolsOf = (indices) => {
  const used = new Map();
  return new Map(indices.map((index) => {
    const { colour, symbol } = comparison.groups[index], taken = used.get(colour) ?? [];
    const choices = ["", "-open"].flatMap((end) => [symbol, ...SYMBOLS].map((name) => name + end));
    const free = choices.find((name) => !taken.includes(name)) ?? symbol;
    used.set(colour, [...taken, free]);
    return [index, free];
  }));
};

// Draw the curves of the chosen group and of those with the best scores.
const drawCurves = () => {
  const first = [best, chosen].filter((index) => visible.includes(index));
  const drawn = [...new Set([...first, ...visible])].slice(0, MAX_CURVES).sort((a, b) => a - b);
  const symbols = symbolsOf(drawn), values = [];
  const traces = drawn.map((index) => {
    const group = comparison.groups[index], isFirst = first.includes(index);
    const [y, error] = [group.mean, group.error].map((list) => list && scaled(list));
    values.push(...y);
    return {
      type: "scatter", mode: "lines+markers", name: legendName(index), x: group.t, y, customdata: group.t.map(() => index),
      line: { color: group.colour, dash: group.dash, width: isFirst ? 3.5 : 1.4, shape: comparison.few ? "linear" : "hv" },
      marker: { symbol: symbols.get(index), color: group.colour, size: 7, maxdisplayed: MARKERS_PER_CURVE },
      opacity: isFirst ? 1 : 0.65,
      error_y: error && comparison.few ? { type: "data", array: error, thickness: 1, width: 2 } : undefined,
      hovertemplate: "%{fullData.name}<br>t = %{x}: %{y:.4g}<extra></extra>",
    };
  });
  byId("curves").dataset.shown = drawn.join(",");
  byId("curves-note").textContent = drawn.length < visible.length
    ? `${drawn.length} of ${visible.length} runs: the best by validation. The filters below choose others.` : "";
  const title = inPercent(comparison.vision ? "test error" : "test perplexity");
  describe("curves", `${title} after each arrival, ${plural(drawn.length, "run")}.`);
  const xaxis = { title: { text: "mega-batches arrived" }, gridcolor: GRID, zeroline: false, automargin: true };
  if (comparison.few) xaxis.dtick = 1;
  return Plotly.react("curves", traces, { ...LAYOUT, xaxis, yaxis: axis(title, values) }, CONFIG);
};

// ---- quality against cost
// Return the text that a point shows: the run and its results.
const hoverText = (group) => [
  `<b>${escaped(group.label)}</b>`,
  `${objective().name}: ${shown(valueOf(group))}`, `${objective().score}: ${shown(scoreOf(group))}`,
  `${comparison.quality}: ${withError(group.quality)}`,
  `${withUnit(group.params)} parameters, ${withUnit(group.comp)}FLOP of training, ${group.wall_text}`,
].join("<br>");

// Return those of some groups that no other one beats, from left to right. A group beats another one if it is at least as
// good on both axes and better on one.
const paretoFront = (indices, x, y) => {
  const points = indices.map((index) => [x(index), y(index), index]);
  points.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const front = [];
  let lowest = [null, Infinity];
  for (const [pointX, pointY, index] of points) {
    // Equal points do not beat each other, so all of them are on the front.
    if (pointY < lowest[1] || (pointY === lowest[1] && pointX === lowest[0])) {
      front.push(index);
      lowest = [pointX, pointY];
    }
  }
  return front;
};

const drawTradeoff = () => {
  const { of: xOf, name: xName } = AXES[state.x], { of: yOf, name: yName } = QUALITIES[state.y];
  const x = (index) => xOf(comparison.groups[index])[0], y = (index) => yOf(comparison.groups[index])[0];
  const drawn = visible.filter((index) => comparison.groups[index].finished && x(index) !== null && y(index) !== null);
  const byLearner = new Map();
  for (const index of [...drawn].sort((a, b) => a - b)) {
    const { learner } = comparison.groups[index];
    byLearner.set(learner, [...(byLearner.get(learner) ?? []), index]);
  }
  const traces = [...byLearner].map(([learner, indices]) => {
    const groups = indices.map((index) => comparison.groups[index]), errors = groups.map((group) => yOf(group)[1]);
    const visibleErrors = drawn.length <= FEW_POINTS && errors.some((error) => error !== null);
    return {
      type: "scatter", mode: "markers", name: escaped(learner), customdata: indices, x: indices.map(x), y: indices.map(y),
      error_y: { type: "data", array: errors, thickness: 1, width: 2, visible: visibleErrors },
      text: groups.map(hoverText), hovertemplate: "%{text}<extra></extra>",
      marker: {
        color: groups[0].colour, symbol: groups[0].symbol,
        size: indices.map((index) => (index === best || index === chosen ? 14 : 8)),
        line: { width: indices.map((index) => (index === best ? 3 : index === chosen ? 2 : 0)), color: INK },
      },
    };
  });
  // The longer of two waits is no cost: it has no front.
  const front = state.x === "wait" ? [] : paretoFront(drawn, x, y);
  if (front.length) {
    traces.push({
      type: "scatter", mode: "lines", name: "Pareto front", x: front.map(x), y: front.map(y),
      line: { shape: "hv", color: "#5b6675", width: 1.5, dash: "dot" }, hoverinfo: "skip",
    });
  }
  const names = front.slice(0, 12).map((index) => comparison.groups[index].label).join("; ");
  byId("front").dataset.front = front.join(",");
  byId("front").textContent =
    front.length ? `On the Pareto front (${front.length}): ${names}${front.length > 12 ? "; ..." : ""}` : "";
  describe("tradeoff", `${yName()} against ${xName()}, ${plural(drawn.length, "run")}, ${front.length} on the Pareto front.`);
  const layout = { ...LAYOUT, xaxis: axis(xName(), drawn.map(x)), yaxis: axis(yName(), drawn.map(y)) };
  return Plotly.react("tradeoff", traces, layout, CONFIG);
};

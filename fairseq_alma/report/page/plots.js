// Draw the three plots: quality against cost, quality against the wait, and the curves over the stream.

const LAYOUT = {
  margin: { l: 60, r: 12, t: 8, b: 48 }, paper_bgcolor: "white", plot_bgcolor: "white", hovermode: "closest",
  font: { family: "system-ui, sans-serif", size: 12, color: "#1c2430" }, showlegend: false,
};
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const GRID = "#e8ebef", INK = "#1c2430";
// Number of markers on a curve with many points.
const MARKERS_PER_CURVE = 8;

// Escape text, because Plotly interprets some HTML tags in names and hover texts.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Return the ticks of a logarithmic axis: as many of 1, 2, 5 (or 1 to 9) times a power of ten as can be read.
const logTicks = (low, high) => {
  const decades = Math.log10(high / low);
  const choices = decades > 4 ? [[1]] : decades > 1.5 ? [[1, 3], [1, 2, 5]] : [[1, 2, 3, 5], [1, 2, 3, 4, 5, 6, 7, 8]];
  let ticks = [];
  for (const digits of choices) {
    ticks = [];
    for (let power = Math.floor(Math.log10(low)) - 1; power <= Math.ceil(Math.log10(high)); power++) {
      for (const digit of digits) {
        const value = Number(`${digit}e${power}`);
        if (value >= low * 0.95 && value <= high * 1.05) ticks.push(value);
      }
    }
    if (ticks.length >= 4) break;
  }
  return ticks;
};

// Return the title of an axis, in lines that are short enough for a narrow screen.
const wrapped = (title) => {
  const lines = [""];
  for (const word of title.split(" ")) {
    if (lines.at(-1).length + word.length > 40) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) ? " " : ""}${word}`;
  }
  return lines.join("<br>");
};

// Return the layout of an axis. It is logarithmic if the largest value is at least three times the smallest; the title
// then says so.
const axis = (title, values, ticks = null) => {
  const positive = values.filter((value) => Number.isFinite(value) && value > 0);
  const low = Math.min(...positive), high = Math.max(...positive), isLog = positive.length > 0 && high / low >= 3;
  const settings = { gridcolor: GRID, zeroline: false, automargin: true, nticks: 7 };
  if (!isLog) {
    // Ticks have three significant digits. If all values are almost equal, widen the axis, so that ticks differ.
    const range = high > 0 && high / low < 1.05 ? [0.9 * low, 1.1 * high] : undefined;
    const tickformat = high >= 1000 ? ".3~s" : ".3~r";
    return { ...settings, title: { text: wrapped(title) }, type: "linear", tickvals: undefined, tickformat, range };
  }
  const tickvals = ticks ?? logTicks(low, high);
  return {
    ...settings, title: { text: wrapped(`${title}, logarithmic`) }, type: "log", tickvals, tickangle: 0,
    ticktext: tickvals.map((value) => withUnit(value).trim()),
  };
};

// Return the text that a point shows: the run and its results.
const hoverText = (group) => [
  `<b>${escaped(group.label)}</b>`,
  `${escaped(objective().name)}: ${withError(valueOf(group), scale())}${unit()}`,
  `${escaped(objective().score)}: ${scoreOf(group) === null ? "-" : fixed(scaled(scoreOf(group)), 2) + unit()}`,
  `${paperName()}: ${withError(group.quality)}`,
  `${withUnit(group.params)} parameters, ${withUnit(group.comp)}FLOP of training, ${wallOf(group)}`,
].join("<br>");

// Put a summary of a plot where screen readers find it.
const describe = (id, text) => byId(id).setAttribute("aria-label", text);

const hasPoint = (group, ...axes) => group.finished && axes.every((one) => Number.isFinite(one.of(group)));

const drawTradeoff = (best) => {
  const x = AXES[state.x], y = QUALITIES[state.y];
  const shown = visible.filter((index) => hasPoint(comparison.groups[index], x, y));
  const learners = [...new Set(shown.map((index) => comparison.groups[index].learner))];
  const traces = learners.map((learner) => {
    const indices = shown.filter((index) => comparison.groups[index].learner === learner);
    const groups = indices.map((index) => comparison.groups[index]);
    const hasErrorBars = shown.length <= FEW_POINTS && groups.some((group) => y.error(group));
    return {
      type: "scatter", mode: "markers", name: escaped(learner), customdata: indices,
      x: groups.map(x.of), y: groups.map(y.of),
      error_y: {
        type: "data", array: groups.map((group) => y.error(group) ?? 0), thickness: 1, width: 2, visible: hasErrorBars,
      },
      text: groups.map(hoverText), hovertemplate: "%{text}<extra></extra>",
      marker: {
        color: groups[0].colour, symbol: groups[0].symbol,
        size: indices.map((index) => (index === best || index === state.chosen ? 14 : 8)),
        opacity: groups.map((group) => (isWithinBudget(group) ? 1 : 0.22)),
        line: { width: indices.map((index) => (index === best ? 3 : index === state.chosen ? 2 : 0)), color: INK },
      },
    };
  });
  const entries = traces.map(({ marker }, i) =>
    ({ label: learners[i], colour: marker.color, dash: null, symbol: marker.symbol }));
  const front = paretoFront(), frontGroups = front.map((index) => comparison.groups[index]);
  byId("front").dataset.front = front.join(",");
  const names = frontGroups.slice(0, 12).map((group) => group.label).join("; ");
  byId("front").textContent =
    front.length ? `On the Pareto front (${front.length}): ${names}${front.length > 12 ? " ..." : ""}` : "";
  traces.push({
    type: "scatter", mode: "lines", name: "Pareto front", x: frontGroups.map(x.of), y: frontGroups.map(y.of),
    line: { shape: "hv", color: "#5b6675", width: 1.5, dash: "dot" }, hoverinfo: "skip",
  });
  if (front.length > 1) entries.push({ label: "Pareto front", colour: "#5b6675", dash: "dot", symbol: null });
  showLegend("tradeoff-legend", entries);
  describe("tradeoff", `${y.name()} against ${x.name()}, ${shown.length} runs. ${byId("front").textContent}`);
  const layout = {
    ...LAYOUT,
    xaxis: axis(x.name(), shown.map((index) => x.of(comparison.groups[index]))),
    yaxis: axis(y.name(), shown.map((index) => y.of(comparison.groups[index]))),
  };
  return Plotly.react("tradeoff", traces, layout, CONFIG);
};

// ---- curves
const numCurves = () => (state.more ? MORE_CURVES : MAX_CURVES);
// Return the button that shows more curves, or fewer; null if there are not more.
const moreButton = (number) => (number <= MAX_CURVES ? null : element("button", {
  type: "button", className: "chip", textContent: state.more ? `show ${MAX_CURVES} curves` : `show up to ${MORE_CURVES} curves`,
  onclick: () => { state.more = !state.more; draw(); },
}));
const showNote = (id, text, button) => byId(id).replaceChildren(text ? `${text} ` : "", ...(button ? [button] : []));

const traceOfCurve = (index, symbol, isHighlighted, isFaded) => {
  const group = comparison.groups[index];
  return {
    type: "scatter", mode: "lines+markers", name: escaped(group.label),
    line: { color: group.colour, dash: group.dash, width: isHighlighted ? 3.5 : 1.4 },
    marker: { symbol, color: group.colour, size: 7, maxdisplayed: MARKERS_PER_CURVE },
    opacity: isFaded ? 0.65 : 1,
  };
};

// Return the lines of the wait plot: lists of groups that differ only in the fixed wait, sorted by it. The lines with the
// most waits come first, and then those with the best scores.
const linesOverWaits = () => {
  const y = QUALITIES[state.y], series = new Map();
  for (const index of visible) {
    const group = comparison.groups[index];
    if (group.has_fixed_wait && hasPoint(group, y)) series.set(group.series, [...(series.get(group.series) ?? []), index]);
  }
  const lines = [...series.values()].filter((line) => new Set(line.map((i) => comparison.groups[i].wait)).size > 1);
  lines.forEach((line) => line.sort((a, b) => comparison.groups[a].wait - comparison.groups[b].wait || a - b));
  const lowest = (line) => Math.min(...line.map((index) => scoreOf(comparison.groups[index]) ?? Infinity));
  return lines.sort((a, b) => lowest(a) - lowest(b) || a[0] - b[0]);
};

const drawWaits = (best) => {
  const y = QUALITIES[state.y], lines = linesOverWaits(), shown = lines.slice(0, numCurves());
  byId("waits-section").hidden = lines.length === 0;
  if (!lines.length) return null;
  const symbols = symbolsOf(shown.map((line) => line[0]));
  const groupsOf = (line) => line.map((index) => comparison.groups[index]);
  // The dashes of other plots show the wait. Here the wait is the x axis, and all lines are solid.
  const traces = shown.map((line) => ({
    ...traceOfCurve(line[0], symbols.get(line[0]), line.includes(best) || line.includes(state.chosen), false),
    x: groupsOf(line).map((group) => group.wait), y: groupsOf(line).map(y.of), customdata: line,
    error_y: { type: "data", array: groupsOf(line).map((group) => y.error(group) ?? 0), thickness: 1, width: 2 },
    text: groupsOf(line).map(hoverText), hovertemplate: "%{text}<extra></extra>",
  }));
  traces.forEach((trace) => { trace.line.dash = "solid"; });
  const values = shown.flatMap(groupsOf);
  const waits = [...new Set(values.map((group) => group.wait))].sort((a, b) => a - b);
  showLegend("waits-legend", shown.map((line) => {
    const group = comparison.groups[line[0]];
    return { label: group.series_label, colour: group.colour, dash: "solid", symbol: symbols.get(line[0]) };
  }));
  byId("waits").dataset.shown = shown.map((line) => line.join("-")).join(",");
  showNote("waits-note", shown.length < lines.length ? `${shown.length} of ${lines.length} lines: the best by validation.` : "",
    moreButton(lines.length));
  describe("waits", `${y.name()} against the wait, ${shown.length} lines.`);
  const layout = {
    ...LAYOUT, xaxis: axis("wait, in mega-batches", waits, waits.length <= 8 ? waits : null),
    yaxis: axis(y.name(), values.map(y.of)),
  };
  return Plotly.react("waits", traces, layout, CONFIG);
};

// Return the indices of the groups whose curves are drawn: the highlighted groups (the best within the budget, and the
// one the user chose), and then groups with the best validation scores.
const groupsWithCurves = (highlighted) => {
  const score = (index) => scoreOf(comparison.groups[index]) ?? Infinity;
  const byScore = [...visible].sort((a, b) => score(a) - score(b) || a - b);
  return [...new Set([...highlighted, ...byScore])].slice(0, numCurves()).sort((a, b) => a - b);
};

let drawnCurves = "";
const drawCurves = (best) => {
  const highlighted = [best, state.chosen].filter((index) => index !== null && visible.includes(index));
  const shown = groupsWithCurves(highlighted);
  // Draw nothing if the curves are the same as before, which is often the case while a slider is moved.
  const key = `${state.c}|${shown.join(",")}|${best}|${state.chosen}|${visible.length}`;
  if (key === drawnCurves) return;
  drawnCurves = key;
  byId("curves").dataset.shown = shown.join(",");
  showNote("curves-note", shown.length < visible.length
    ? `${shown.length} of ${visible.length} runs: the best by validation. Use the filters above to see others.` : "",
    moreButton(visible.length));
  const traces = [], drawnValues = [], symbols = symbolsOf(shown);
  for (const index of shown) {
    const group = comparison.groups[index], isHighlighted = index === best || index === state.chosen;
    // Start the curve of a language model at the first stage, because the perplexity of the untrained model is so large
    // that differences between trained models would not be visible.
    let from = 0;
    if (!comparison.vision) {
      const trained = (t) => t >= group.first_trained_t;
      from = group.first_trained_t === null ? group.t.length : group.t.findIndex(trained);
    }
    const times = group.t.slice(from), isShort = comparison.B <= FEW_ARRIVALS;
    const values = group.mean.slice(from).map((value) => (value === null ? null : value * scale()));
    drawnValues.push(...values);
    const trace = traceOfCurve(index, symbols.get(index), isHighlighted, !isHighlighted && highlighted.length > 0);
    trace.line.shape = isShort ? "linear" : "hv";
    traces.push({
      ...trace, x: times, y: values, customdata: times.map(() => index),
      error_y: group.error && isShort
        ? { type: "data", array: group.error.slice(from).map((value) => value * scale()), thickness: 1, width: 2 }
        : undefined,
      hovertemplate: "%{fullData.name}<br>t = %{x}: %{y:.4g}<extra></extra>",
    });
  }
  showLegend("curves-legend", shown.map((index) => {
    const { label, colour, dash } = comparison.groups[index];
    return { label, colour, dash, symbol: symbols.get(index), index };
  }));
  const title = comparison.vision ? "test error, %" : "test perplexity";
  describe("curves", `${title} after each arrival, ${shown.length} runs.`);
  const layout = {
    ...LAYOUT,
    xaxis: {
      title: { text: "mega-batches arrived" }, ...(comparison.B <= FEW_ARRIVALS ? { dtick: 1 } : {}),
      gridcolor: GRID, zeroline: false,
    },
    yaxis: axis(title, drawnValues),
  };
  return Plotly.react("curves", traces, layout, CONFIG);
};

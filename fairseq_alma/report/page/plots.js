// Draw the two plots: the trade-off between quality and cost, and the curves over the stream.

const LAYOUT = {
  margin: { l: 60, r: 12, t: 8, b: 48 }, paper_bgcolor: "white", plot_bgcolor: "white", hovermode: "closest",
  font: { family: "system-ui, sans-serif", size: 12, color: "#1c2430" },
  legend: { orientation: "h", y: -0.24, yanchor: "top", x: 0 },
};
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
const GRID = "#e8ebef", INK = "#1c2430";

// Escape text, because Plotly interprets some HTML tags in names and hover texts.
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// Return the layout of an axis. It is logarithmic if the largest value is at least three times the smallest.
const axis = (title, values) => {
  const positive = values.filter((value) => Number.isFinite(value) && value > 0);
  const isLog = positive.length > 0 && Math.max(...positive) / Math.min(...positive) >= 3;
  return {
    title: { text: title }, type: isLog ? "log" : "linear", gridcolor: GRID, zeroline: false, exponentformat: "SI",
    automargin: true,
  };
};

const drawTradeoff = (best) => {
  const x = AXES[state.x], y = QUALITIES[state.y];
  const shown = visible.filter((index) => {
    const group = comparison.groups[index];
    return group.finished && Number.isFinite(x.of(group)) && Number.isFinite(y.of(group));
  });
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
      text: groups.map((group) => escaped(group.label)),
      hovertemplate:
        "%{text}<br>%{xaxis.title.text}: %{x:.4s}<br>%{yaxis.title.text}: %{y:.4g}<extra></extra>",
      marker: {
        color: groups[0].colour, symbol: groups[0].symbol,
        size: indices.map((index) => (index === best || index === state.chosen ? 14 : 8)),
        opacity: groups.map((group) => (isWithinBudget(group) ? 1 : 0.22)),
        line: { width: indices.map((index) => (index === best ? 3 : index === state.chosen ? 2 : 0)), color: INK },
      },
    };
  });
  const front = paretoFront(), frontGroups = front.map((index) => comparison.groups[index]);
  byId("front").dataset.front = front.join(",");
  const names = frontGroups.slice(0, 12).map((group) => group.label).join("; ");
  byId("front").textContent =
    front.length ? `On the Pareto front (${front.length}): ${names}${front.length > 12 ? " ..." : ""}` : "";
  traces.push({
    type: "scatter", mode: "lines", name: "Pareto front", x: frontGroups.map(x.of), y: frontGroups.map(y.of),
    line: { shape: "hv", color: "#5b6675", width: 1.5, dash: "dot" }, hoverinfo: "skip",
  });
  const layout = {
    ...LAYOUT,
    xaxis: axis(x.name(), shown.map((index) => x.of(comparison.groups[index]))),
    yaxis: axis(y.name(), shown.map((index) => y.of(comparison.groups[index]))),
  };
  return Plotly.react("tradeoff", traces, layout, CONFIG);
};

// Return the indices of the groups whose curves are drawn: the highlighted groups (the best within the budget, and the
// one the user chose), and then groups with the best validation scores.
const groupsWithCurves = (highlighted) => {
  const score = (index) => comparison.groups[index].score ?? Infinity;
  const byScore = [...visible].sort((a, b) => score(a) - score(b) || a - b);
  return [...new Set([...highlighted, ...byScore])].slice(0, MAX_CURVES).sort((a, b) => a - b);
};

let drawnCurves = "";
const drawCurves = (best) => {
  const highlighted = [best, state.chosen].filter((index) => index !== null && visible.includes(index));
  const shown = groupsWithCurves(highlighted);
  // Draw nothing if the curves are the same as before, which is often the case while a slider is moved.
  const key = `${state.c}|${shown.join(",")}|${best}|${state.chosen}`;
  if (key === drawnCurves) return;
  drawnCurves = key;
  byId("curves").dataset.shown = shown.join(",");
  byId("curves-note").textContent = shown.length < visible.length
    ? `${shown.length} of ${visible.length} runs: the best by validation. Use the filters above to see others.` : "";
  const traces = [], drawnValues = [];
  for (const index of shown) {
    const group = comparison.groups[index], isHighlighted = index === best || index === state.chosen;
    // Start the curve of a language model at the first stage, because the perplexity of the untrained model is so large
    // that differences between trained models would not be visible.
    let from = 0;
    if (!comparison.vision) {
      const trained = (t) => t >= group.first_trained_t;
      from = group.first_trained_t === null ? group.t.length : group.t.findIndex(trained);
    }
    const times = group.t.slice(from);
    const values = group.mean.slice(from).map((value) => (value === null ? null : value * percent()));
    const isShort = times.length <= FEW_ARRIVALS;
    drawnValues.push(...values);
    traces.push({
      type: "scatter", mode: isShort ? "lines+markers" : "lines", name: escaped(group.label),
      x: times, y: values, customdata: times.map(() => index),
      line: {
        color: group.colour, dash: group.dash, width: isHighlighted ? 3.5 : 1.4,
        shape: comparison.B > FEW_ARRIVALS ? "hv" : "linear",
      },
      marker: { symbol: group.symbol, size: 6 },
      opacity: isHighlighted || !highlighted.length ? 1 : 0.65,
      showlegend: shown.length <= 12,
      error_y: group.error && isShort
        ? { type: "data", array: group.error.slice(from).map((value) => value * percent()), thickness: 1, width: 2 }
        : undefined,
      hovertemplate: "%{fullData.name}<br>t = %{x}: %{y:.4g}<extra></extra>",
    });
  }
  const layout = {
    ...LAYOUT,
    xaxis: {
      title: { text: "mega-batches arrived" }, ...(comparison.B <= FEW_ARRIVALS ? { dtick: 1 } : {}),
      gridcolor: GRID, zeroline: false,
    },
    yaxis: axis(comparison.vision ? "test error, %" : "test perplexity", drawnValues),
  };
  return Plotly.react("curves", traces, layout, CONFIG);
};

"use strict";
(() => {
  // Everything that is shown follows from `data`, which the report wrote, and `state`, which the address keeps.
  const data = JSON.parse(document.getElementById("data").textContent, (_, value) => (value === "\0infinite" ? Infinity : value));
  const $ = (id) => document.getElementById(id);
  const MOST_CURVES = 30, FEW_POINTS = 200;

  const element = (tag, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);  // strings become text, never markup
    return made;
  };

  // ---- numbers for people
  const UNITS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const short = (value) => {
    if (value === null || value === undefined) return "";
    for (const [size, unit] of UNITS) if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
    return `${+value.toPrecision(3)}`;
  };
  const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "inf");
  const withError = (pair, scale = 1, digits = 2) =>
    pair === null ? "" : fixed(scale * pair[0], digits) + (pair[1] === null ? "" : ` ± ${fixed(scale * pair[1], digits)}`);

  let comparison, visible = [], rowOf = new Map(), rowsMade = new Map();
  const state = { c: 0, off: {}, comp: null, params: null, final: null, x: "comp", y: "quality", sort: "score", down: false, chosen: null };

  // ---- what can be asked of a run
  const percent = () => (comparison.vision ? 100 : 1);
  const qualityName = () => (comparison.vision ? "CER" : "average perplexity");
  const finalName = () => (comparison.vision ? "final error" : "final perplexity");
  const AXES = {
    comp: { of: (run) => run.comp, name: () => "training FLOPs" },
    params: { of: (run) => run.params, name: () => "parameters, last" },
    mem: { of: (run) => run.mem, name: () => "Mem (parameters, summed)" },
    forward: { of: (run) => run.forward, name: () => "FLOPs of one prediction" },
    wall: { of: (run) => run.wall, name: () => "wall time, s" },
  };
  const QUALITIES = {
    quality: { of: (run) => run.quality && run.quality[0], error: (run) => run.quality && run.quality[1], name: () => `${qualityName()}, test` },
    after: { of: (run) => run.after && run.after[0], error: (run) => run.after && run.after[1], name: () => "average perplexity after the first stage, test", only: () => !comparison.vision },
    final: { of: (run) => run.final && run.final[0] * percent(), error: (run) => run.final && run.final[1] !== null ? run.final[1] * percent() : null, name: () => `${finalName()}, test${comparison.vision ? ", %" : ""}` },
    score: { of: (run) => run.score, error: () => null, name: () => `${qualityName()}, validation` },
  };
  const LIMITS = {
    comp: { of: (run) => run.comp, text: (value) => `${short(value)}FLOP` },
    params: { of: (run) => run.params, text: short },
    final: { of: (run) => run.final_validation && run.final_validation[0], text: (value) => comparison.vision ? `${fixed(100 * value, 2)} %` : fixed(value, 2) },
  };

  // ---- choosing: the same few lines as choice.py
  const candidates = () => visible.filter((index) => comparison.runs[index].finished && comparison.runs[index].score !== null);
  const keeps = (run) => Object.keys(LIMITS).every((name) => {
    if (state[name] === null) return true;
    const value = LIMITS[name].of(run);
    return value !== null && value !== undefined && value <= state[name];
  });
  const bestWithin = () => {
    let best = null;
    for (const index of candidates()) {
      const run = comparison.runs[index];
      if (!keeps(run)) continue;
      const key = [run.score, run.comp, run.params, index];
      if (best === null || less(key, best)) best = key;
    }
    return best === null ? null : best[3];
  };
  const less = (a, b) => {
    for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i];
    return false;
  };
  const paretoFront = () => {
    const x = AXES[state.x].of, y = QUALITIES[state.y].of;
    const points = visible.filter((index) => comparison.runs[index].finished)
      .map((index) => [x(comparison.runs[index]), y(comparison.runs[index]), index])
      .filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b));
    points.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
    const front = [];
    let lowest = Infinity, at = null;
    for (const point of points) {
      // Equal points do not beat each other: both are on the front.
      if (point[1] < lowest || (point[1] === lowest && point[0] === at)) {
        front.push(point[2]);
        lowest = point[1];
        at = point[0];
      }
    }
    return front;
  };

  // ---- the answer
  const showAnswer = () => {
    const box = $("answer"), best = bestWithin(), scale = percent();
    box.dataset.best = best === null ? "" : String(best);
    const table = $("alternatives");
    if (best === null) {
      const why = candidates().length ? "No run keeps to this budget: move a slider to the right." : "No run shown here is finished and has validation numbers, so none can be chosen.";
      box.replaceChildren(element("p", { className: "best", textContent: why }));
      table.replaceChildren();
      return best;
    }
    const run = comparison.runs[best];
    const name = element("button", { textContent: run.label, onclick: () => choose(best) });
    const facts = `On test data: ${qualityName()} ${withError(run.quality)}, ${finalName()} ${withError(run.final, scale)}${comparison.vision ? " %" : ""}; ` +
      `${short(run.params)} parameters, ${short(run.comp)}FLOP of training, ${run.wall_text} (${run.seeds.length} seed${run.seeds.length > 1 ? "s" : ""}).`;
    const rule = `Lowest ${qualityName()} on validation data (${fixed(run.score, 2)}) of ${candidates().filter((index) => keeps(comparison.runs[index])).length} runs within the budget.`;
    box.replaceChildren(element("p", { className: "best" }, name), element("p", { textContent: facts }), element("p", { className: "small", textContent: rule }));
    showAlternatives(table, run);
    return best;
  };

  const WORDS = { wait: "waiting", replay: "replay", growth: "growing or not" };
  const showAlternatives = (table, run) => {
    if (!run.others.length) {
      table.replaceChildren();
      return;
    }
    const head = element("tr", {}, ...["what else", "run", qualityName(), "difference", finalName(), "training FLOPs", "parameters"].map((text, i) => element("th", { textContent: text, className: i < 2 ? "text" : "" })));
    const rows = run.others.map(([change, index]) => {
      const other = comparison.runs[index];
      const gap = other.quality[0] - run.quality[0];
      const error = run.quality[1] === null || other.quality[1] === null ? null : Math.hypot(run.quality[1], other.quality[1]);
      const gapCell = element("td", { textContent: (gap > 0 ? "+" : "") + withError([gap, error]), className: gap > 0 ? "worse" : "better" });
      const finalGap = percent() * (other.final[0] - run.final[0]);
      const times = (a, b) => (b > 0 ? `× ${+(a / b).toPrecision(3)}` : "");
      const row = element("tr", {},
        element("td", { textContent: WORDS[change], className: "text" }),
        element("td", { textContent: other.label, className: "text" }),
        element("td", { textContent: withError(other.quality) }), gapCell,
        element("td", { textContent: (finalGap > 0 ? "+" : "") + fixed(finalGap, 2) }),
        element("td", { textContent: times(other.comp, run.comp) }), element("td", { textContent: times(other.params, run.params) }));
      row.dataset.run = String(index);
      return row;
    });
    table.replaceChildren(element("caption", { textContent: "Had one decided otherwise (test data):", className: "small", style: "text-align:left" }), element("thead", {}, head), element("tbody", {}, ...rows));
  };

  // ---- plots
  const LAYOUT = {
    margin: { l: 60, r: 12, t: 8, b: 48 }, paper_bgcolor: "white", plot_bgcolor: "white", hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 12, color: "#1c2430" }, legend: { orientation: "h", y: -0.24, yanchor: "top", x: 0 },
  };
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
  const axis = (title, values) => {
    const positive = values.filter((value) => Number.isFinite(value) && value > 0);
    const log = positive.length > 0 && Math.max(...positive) / Math.min(...positive) >= 3;
    return { title: { text: title }, type: log ? "log" : "linear", gridcolor: "#e8ebef", zeroline: false, exponentformat: "SI", automargin: true, ...(log ? { dtick: undefined } : {}) };
  };

  const drawTradeoff = (best) => {
    const x = AXES[state.x], y = QUALITIES[state.y];
    const shown = visible.filter((index) => comparison.runs[index].finished && Number.isFinite(x.of(comparison.runs[index])) && Number.isFinite(y.of(comparison.runs[index])));
    const learners = [...new Set(shown.map((index) => comparison.runs[index].learner))];
    const traces = learners.map((learner) => {
      const mine = shown.filter((index) => comparison.runs[index].learner === learner), runs = mine.map((index) => comparison.runs[index]);
      return {
        type: "scatter", mode: "markers", name: escaped(learner), customdata: mine, x: runs.map(x.of), y: runs.map(y.of),
        error_y: { type: "data", array: runs.map((run) => y.error(run) ?? 0), thickness: 1, width: 2, visible: shown.length <= FEW_POINTS && runs.some((run) => y.error(run)) },
        text: runs.map((run) => escaped(run.label)), hovertemplate: "%{text}<br>%{xaxis.title.text}: %{x:.4s}<br>%{yaxis.title.text}: %{y:.4g}<extra></extra>",
        marker: { color: runs[0].colour, symbol: runs[0].symbol, size: mine.map((index) => (index === best || index === state.chosen ? 14 : 8)), opacity: runs.map((run) => (keeps(run) ? 1 : 0.22)), line: { width: mine.map((index) => (index === best ? 3 : index === state.chosen ? 2 : 0)), color: "#1c2430" } },
      };
    });
    const front = paretoFront(), points = front.map((index) => comparison.runs[index]);
    $("front").dataset.front = front.join(",");
    $("front").textContent = front.length ? `On the Pareto front (${front.length}): ${points.slice(0, 12).map((run) => run.label).join("; ")}${front.length > 12 ? " ..." : ""}` : "";
    traces.push({ type: "scatter", mode: "lines", name: "Pareto front", x: points.map(x.of), y: points.map(y.of), line: { shape: "hv", color: "#5b6675", width: 1.5, dash: "dot" }, hoverinfo: "skip" });
    const layout = { ...LAYOUT, xaxis: axis(x.name(), shown.map((index) => x.of(comparison.runs[index]))), yaxis: axis(y.name(), shown.map((index) => y.of(comparison.runs[index]))) };
    return Plotly.react("tradeoff", traces, layout, CONFIG);
  };

  let curvesOf = "";
  const drawCurves = (best) => {
    const wanted = [best, state.chosen].filter((index) => index !== null && visible.includes(index));
    const byScore = [...visible].sort((a, b) => (comparison.runs[a].score ?? Infinity) - (comparison.runs[b].score ?? Infinity) || a - b);
    const shown = [...new Set([...wanted, ...byScore])].slice(0, MOST_CURVES).sort((a, b) => a - b);
    const key = `${state.c}|${shown.join(",")}|${best}|${state.chosen}`;
    if (key === curvesOf) return;  // a slider that changes no curve costs nothing
    curvesOf = key;
    $("curves").dataset.shown = shown.join(",");
    $("curves-note").textContent = shown.length < visible.length ? `${shown.length} of ${visible.length} runs: the best by validation. Narrow the choice above to see others.` : "";
    const traces = [], values = [];
    for (const index of shown) {
      const run = comparison.runs[index], strong = index === best || index === state.chosen;
      const y = run.y.map((value) => (value === null ? null : value * percent()));
      // An untrained perplexity would flatten all others.
      const from = comparison.vision ? 0 : run.first === null ? run.t.length : run.t.findIndex((t) => t >= run.first);
      const times = run.t.slice(from), levels = y.slice(from);
      values.push(...levels);
      traces.push({
        type: "scatter", mode: times.length <= 12 ? "lines+markers" : "lines", name: escaped(run.label), x: times, y: levels, customdata: times.map(() => index),
        line: { color: run.colour, dash: run.dash, width: strong ? 3.5 : 1.4, shape: comparison.B > 12 ? "hv" : "linear" }, marker: { symbol: run.symbol, size: 6 },
        opacity: strong || !wanted.length ? 1 : 0.65, showlegend: shown.length <= 12,
        error_y: run.e && times.length <= 12 ? { type: "data", array: run.e.slice(from).map((value) => value * percent()), thickness: 1, width: 2 } : undefined,
        hovertemplate: "%{fullData.name}<br>t = %{x}: %{y:.4g}<extra></extra>",
      });
    }
    const title = comparison.vision ? "test error, %" : "test perplexity";
    const layout = { ...LAYOUT, xaxis: { title: { text: "mega-batches arrived" }, ...(comparison.B <= 12 ? { dtick: 1 } : {}), gridcolor: "#e8ebef", zeroline: false }, yaxis: axis(title, values) };
    return Plotly.react("curves", traces, layout, CONFIG);
  };

  // Plotly reads a few tags in names and hover texts: a setting must not be taken for one.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ---- one run
  const showDetail = () => {
    const box = $("detail");
    if (state.chosen === null || !comparison.runs[state.chosen]) {
      box.replaceChildren(element("p", { className: "small", textContent: "Choose a run: in a plot, or in the table." }));
      return;
    }
    const run = comparison.runs[state.chosen];
    const list = (settings) => element("dl", { className: "settings" }, ...Object.entries(settings).map(([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
    const quoted = run.command.map((word) => (/^[\w@%+=:,./\-[\]]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`)).join(" ");
    box.replaceChildren(
      element("p", {}, element("strong", { textContent: run.label }), ` · ${run.state} · seeds ${run.seeds.join(", ")} · ${run.wall_text}`),
      element("p", { className: "small", textContent: `${run.folder}${run.commit ? ` · commit ${run.commit}` : ""}` }),
      element("p", { className: "small", textContent: "The command that makes it again:" }), element("pre", { id: "command", textContent: quoted || "not noted in its provenance.json" }),
      element("p", { className: "small", textContent: "Settings in which the runs differ, and those of this learner:" }), list({ ...run.settings, ...run.own }),
      element("details", {}, element("summary", { className: "small", textContent: "Settings that all runs share" }), list(comparison.common)));
  };

  // ---- the table
  const COLUMNS = () => [
    { key: "label", name: "run", of: (run) => run.label, text: (run) => run.label, left: true },
    { key: "seeds", name: "seeds", of: (run) => run.seeds.length, text: (run) => String(run.seeds.length) },
    { key: "quality", name: qualityName(), of: (run) => run.quality && run.quality[0], text: (run) => withError(run.quality) },
    { key: "final", name: finalName() + (comparison.vision ? ", %" : ""), of: (run) => run.final && run.final[0], text: (run) => withError(run.final, percent()) },
    { key: "final_validation", name: "final validation", of: (run) => run.final_validation && run.final_validation[0], text: (run) => withError(run.final_validation, percent()) },
    { key: "score", name: `${qualityName()}, validation`, of: (run) => run.score, text: (run) => (run.score === null ? "" : fixed(run.score, 2)) },
    { key: "params", name: "parameters", of: (run) => run.params, text: (run) => Math.round(run.params).toLocaleString("en") },
    { key: "mem", name: "Mem", of: (run) => run.mem, text: (run) => short(run.mem) },
    { key: "comp", name: "training FLOPs", of: (run) => run.comp, text: (run) => short(run.comp) },
    { key: "wall", name: "wall time", of: (run) => run.wall, text: (run) => run.wall_text },
    { key: "state", name: "state", of: (run) => run.state, text: (run) => run.state, left: true },
  ];
  const buildTable = () => {
    const columns = COLUMNS(), by = columns.find((column) => column.key === state.sort) ?? columns[0];
    const order = [...visible].sort((a, b) => {
      const x = by.of(comparison.runs[a]), y = by.of(comparison.runs[b]);
      if (x === null || y === null || x === y) return (x === null) - (y === null) || a - b;  // what is not known comes last
      const sign = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
      return state.down ? -sign : sign;
    });
    const head = element("tr", {}, ...columns.map((column) => {
      const arrow = column.key === state.sort ? (state.down ? " ↓" : " ↑") : "";
      const cell = element("th", { className: column.left ? "text" : "" }, element("button", { textContent: column.name + arrow, onclick: () => { state.down = state.sort === column.key && !state.down; state.sort = column.key; buildTable(); markTable(bestWithin()); remember(); } }));
      cell.setAttribute("aria-sort", arrow ? (state.down ? "descending" : "ascending") : "none");
      return cell;
    }));
    rowOf = new Map(order.map((index) => [index, rowsMade.get(index) ?? makeRow(columns, index)]));
    $("runs").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rowOf.values()));
  };
  const makeRow = (columns, index) => {  // once: to sort a thousand rows is to move them
    const run = comparison.runs[index];
    const row = element("tr", { tabIndex: 0, onclick: () => choose(index), onkeydown: (event) => { if (event.key === "Enter") choose(index); } }, ...columns.map((column, i) => {
      const cell = element("td", { className: column.left ? "text" : "" });
      if (i === 0) {
        const swatch = element("span", { className: "swatch" });
        swatch.style.background = run.colour;
        cell.append(swatch);
      }
      cell.append(column.text(run));
      return cell;
    }));
    row.dataset.run = String(index);
    rowsMade.set(index, row);
    return row;
  };
  const markTable = (best) => {
    for (const [index, row] of rowOf) {
      const name = [index === best ? "best" : "", index === state.chosen ? "chosen" : "", keeps(comparison.runs[index]) ? "" : "beyond"].filter(Boolean).join(" ");
      if (row.className !== name) row.className = name;
    }
  };

  // ---- controls
  const values = (name) => [...new Set(comparison.runs.filter((run) => run.finished).map(LIMITS[name].of).filter((value) => value !== null && value !== undefined))].sort((a, b) => a - b);
  const buildSliders = () => {
    $("final-label").textContent = comparison.vision ? "Final error (validation), at most" : "Final perplexity (validation), at most";
    for (const name of Object.keys(LIMITS)) {
      const steps = values(name), input = $(name);
      input.max = String(steps.length);
      const at = state[name] === null ? -1 : steps.findIndex((value) => value >= state[name]);
      if (at < 0) state[name] = null;
      input.value = String(at < 0 ? steps.length : at);
      const say = () => { $(`${name}-value`).textContent = state[name] === null ? "no limit" : LIMITS[name].text(state[name]); input.setAttribute("aria-valuetext", $(`${name}-value`).textContent); };
      input.oninput = () => {
        const step = Number(input.value);
        state[name] = step >= steps.length ? null : steps[step];
        say();
        soon();
      };
      say();
    }
  };
  const buildFilters = () => {
    $("filters").replaceChildren(...comparison.filters.map(({ name, values: options }) => {
      const off = new Set(state.off[name] ?? []);
      return element("fieldset", {}, element("legend", { textContent: name }), ...options.map((value) => {
        const chip = element("button", { className: "chip", type: "button", textContent: value });
        chip.dataset.filter = name;
        chip.dataset.value = value;
        chip.setAttribute("aria-pressed", String(!off.has(value)));
        chip.onclick = () => {
          const now = new Set(state.off[name] ?? []);
          // The first click means "this one": to take eleven others away by hand is no way to choose.
          if (!now.size && options.length > 2) options.forEach((other) => other !== value && now.add(other));
          else if (now.has(value)) now.delete(value);
          else now.add(value);
          state.off[name] = now.size === options.length ? [] : [...now];
          buildFilters();
          refilter();
        };
        return chip;
      }));
    }), element("button", { className: "chip", type: "button", textContent: "show all", id: "show-all", onclick: () => { state.off = {}; buildFilters(); refilter(); } }));
  };
  const options = (select, axes, key) => {
    select.replaceChildren(...Object.entries(axes).filter(([, one]) => !one.only || one.only()).map(([name, one]) => element("option", { value: name, textContent: one.name(), selected: state[key] === name })));
    select.onchange = () => { state[key] = select.value; soon(); };
  };

  // ---- the way of a change
  const refilter = () => {
    visible = comparison.runs.map((_, index) => index).filter((index) => comparison.filters.every(({ name }) => !(state.off[name] ?? []).includes(comparison.runs[index].settings[name])));
    $("count").textContent = `${visible.length} of ${comparison.runs.length} runs`;
    buildTable();
    draw();
  };
  const draw = (plots = true) => {
    const best = showAnswer();
    markTable(best);
    clearTimeout(resting);
    const drawPlots = () => {
      drawTradeoff(best);
      drawCurves(best);
      remember();
    };
    if (plots) drawPlots();
    else resting = setTimeout(drawPlots, 300);
  };
  let waiting = false, resting = 0;
  // Many events of one drag are one drawing; with many runs the answer follows the hand, and the plots when it rests.
  const soon = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(visible.length <= FEW_POINTS); });
  };
  const choose = (index) => {
    state.chosen = index;
    showDetail();
    draw();
  };
  const remember = () => {
    // By name: the next report may have more runs, in other places.
    const kept = { ...state, c: comparison.name, chosen: state.chosen === null ? null : comparison.runs[state.chosen].folder };
    try { history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(kept))}`); } catch { /* a page inside another may not */ }
  };
  const open = (number) => {
    comparison = data.comparisons[number];
    rowsMade = new Map();
    state.c = number;
    if (QUALITIES[state.y].only && !QUALITIES[state.y].only()) state.y = "quality";
    options($("x-axis"), AXES, "x");
    options($("y-axis"), QUALITIES, "y");
    buildSliders();
    buildFilters();
    showDetail();
    refilter();
    for (const id of ["tradeoff", "curves"]) {
      $(id).removeAllListeners?.("plotly_click");
      $(id).on("plotly_click", (event) => { const index = event.points[0].customdata; if (Number.isInteger(index)) choose(index); });
    }
  };

  // ---- begin
  try {
    const before = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    state.c = Math.max(0, data.comparisons.findIndex((one) => one.name === before.c));
    const there = data.comparisons[state.c];
    const index = there.runs.findIndex((run) => run.folder === before.chosen);
    state.chosen = index < 0 ? null : index;
    if (Object.hasOwn(AXES, before.x)) state.x = before.x;
    if (Object.hasOwn(QUALITIES, before.y)) state.y = before.y;
    for (const name of Object.keys(LIMITS)) if (Number.isFinite(before[name])) state[name] = before[name];
    for (const { name } of there.filters) if (Array.isArray(before.off?.[name])) state.off[name] = before.off[name].map(String);
    if (typeof before.sort === "string") state.sort = before.sort;
    state.down = before.down === true;
  } catch { /* no state in the address, or not ours: as if it were opened for the first time */ }
  const select = $("comparison");
  select.replaceChildren(...data.comparisons.map((one, number) => element("option", { value: String(number), textContent: one.name, selected: number === state.c })));
  select.onchange = () => { Object.assign(state, { off: {}, comp: null, params: null, final: null, chosen: null }); open(Number(select.value)); };
  open(state.c);
  const reload = Number(document.body.dataset.reload);
  if (reload > 0) {
    let touched = 0;
    for (const event of ["pointerdown", "keydown", "input"]) addEventListener(event, () => { touched = Date.now(); });
    const again = () => (Date.now() - touched > 5000 ? location.reload() : setTimeout(again, 1000));  // not under somebody's hand
    setTimeout(again, 1000 * reload);
  }
})();

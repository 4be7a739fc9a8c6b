// Build sliders, filters and menus, redraw the page after a change, and start the page.

// ---- after a change
// Show the best group within the budget, mark rows in the table, and draw the plots. If `withPlots` is false, draw the
// plots only after 0.3 s without another change, because drawing many points is slow.
let plotTimer = 0;
const draw = (withPlots = true) => {
  const best = showAnswer();
  markRows(best);
  clearTimeout(plotTimer);
  const drawPlots = () => {
    drawTradeoff(best);
    drawWaits(best);
    drawCurves(best);
    remember();
  };
  if (withPlots) drawPlots();
  else plotTimer = setTimeout(drawPlots, 300);
};

// Draw at most once per frame, because moving a slider can send many events per frame.
let isFrameRequested = false;
const drawSoon = () => {
  if (isFrameRequested) return;
  isFrameRequested = true;
  requestAnimationFrame(() => {
    isFrameRequested = false;
    draw(visible.length <= FEW_POINTS);
  });
};

const applyFilters = () => {
  const isHidden = (group) =>
    comparison.filters.some(({ name }) => (state.off[name] ?? []).includes(group.settings[name]));
  visible = comparison.groups.map((_, index) => index).filter((index) => !isHidden(comparison.groups[index]));
  byId("count").textContent = `${visible.length} of ${comparison.groups.length} runs`;
  buildTable();
  draw();
};

const choose = (index) => {
  state.chosen = index;
  showDetail();
  draw();
};

// ---- controls
const stepsOf = (name) => {
  const values = comparison.groups.filter((group) => group.finished).map(LIMITS[name].of);
  return sliderSteps(values.filter((value) => value !== null && value !== undefined));
};

const buildSliders = () => {
  byId("target-label").textContent = `Target: ${objective().score}, at most`;
  for (const name of Object.keys(LIMITS)) {
    const steps = stepsOf(name), input = byId(name), output = byId(`${name}-value`);
    // The slider has one step for each value of a finished group; values within 2% are one step. The last step means
    // no limit.
    input.max = String(steps.length);
    const step = state[name] === null ? -1 : steps.findIndex((value) => value >= state[name]);
    if (step < 0) state[name] = null;
    input.value = String(step < 0 ? steps.length : step);
    const showLimit = () => {
      output.textContent = state[name] === null ? "no limit" : LIMITS[name].text(state[name]);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.oninput = () => {
      state[name] = steps[Number(input.value)] ?? null;
      showLimit();
      drawSoon();
    };
    showLimit();
  }
};

// ---- the objective
const buildObjectives = () => {
  const choices = OBJECTIVES.map((name) => {
    const input = element("input", { type: "radio", name: "objective", value: name, checked: name === state.objective });
    input.onchange = () => {
      Object.assign(state, { objective: name, target: null });
      openObjective();
      applyFilters();
    };
    return element("label", {}, input, comparison.objectives[name].name);
  });
  const legend = element("legend", {}, termed("Best by", "objective"));
  byId("objectives").replaceChildren(legend, ...choices);
};

const showObjective = () => {
  const untrained = comparison.vision ? "the error of the untrained network" : "the perplexity of the untrained model";
  byId("objective-note").textContent = {
    all: `Arrivals before the first stage count, with ${untrained}, so waiting costs something.`,
    after: "Arrivals before the first stage do not count, so waiting costs nothing.",
    final: "Only the result after the last arrival counts.",
  }[state.objective] + (comparison.vision ? "" : " Perplexities are averaged as logarithms (geometric mean). The paper's " +
    "arithmetic mean is the column \"average perplexity\".");
};

// Build what depends on the objective.
const openObjective = () => {
  createdRows = new Map();
  drawnCurves = "";
  showObjective();
  buildAxisMenu(byId("x-axis"), AXES, "x");
  buildAxisMenu(byId("y-axis"), QUALITIES, "y");
  buildSliders();
};

// ---- inputs of the cost panel
const startInputs = () => {
  for (const name of ["price", "speed"]) {
    byId(name).value = state[name];
    byId(name).oninput = () => {
      state[name] = byId(name).value;
      drawSoon();
    };
  }
  byId("all-columns").onchange = () => byId("table-section").classList.toggle("all", byId("all-columns").checked);
};

// Link to the printed figures, which alma-report wrote beside the page.
const showFigures = () => {
  const link = (name, suffix, text) =>
    element("a", { href: `figures/${encodeURIComponent(comparison.slug)}/${encodeURIComponent(name)}.${suffix}`, textContent: text });
  byId("figures-section").hidden = comparison.figures.length === 0;
  byId("figures").replaceChildren(...comparison.figures.map((name) =>
    element("li", {}, link(name, "png", name.replace(/_/g, " ")), " ", link(name, "pdf", "PDF"))));
};

// Show the groups with this value of a setting if they are hidden; otherwise hide them.
const toggleFilter = (name, value, allValues) => {
  const hidden = new Set(state.off[name] ?? []);
  if (!hidden.size && allValues.length > 2) {
    // If nothing is hidden, show only this value, so that the user need not hide the other values one by one.
    allValues.forEach((other) => other !== value && hidden.add(other));
  } else if (!hidden.delete(value)) {
    hidden.add(value);
  }
  state.off[name] = hidden.size === allValues.length ? [] : [...hidden];
  buildFilters();
  applyFilters();
};

const buildFilters = () => {
  const fieldsets = comparison.filters.map(({ name, values }) => {
    const hidden = new Set(state.off[name] ?? []);
    const chips = values.map((value) => {
      const onclick = () => toggleFilter(name, value, values);
      const chip = element("button", { className: "chip", type: "button", textContent: value, onclick });
      if (name === "learner") explain(chip, value);
      chip.dataset.filter = name;
      chip.dataset.value = value;
      chip.setAttribute("aria-pressed", String(!hidden.has(value)));
      return chip;
    });
    return element("fieldset", {}, element("legend", {}, termed(name)), ...chips);
  });
  const showAll = element("button", {
    className: "chip", type: "button", textContent: "show all", id: "show-all",
    onclick: () => { state.off = {}; buildFilters(); applyFilters(); },
  });
  byId("filters").replaceChildren(...fieldsets, showAll);
};

// Fill the menu for one axis of the trade-off plot. `key` is "x" or "y".
const buildAxisMenu = (menu, axes, key) => {
  menu.replaceChildren(...Object.entries(axes).map(([value, choice]) =>
    element("option", { value, textContent: choice.name(), selected: state[key] === value })));
  menu.onchange = () => {
    state[key] = menu.value;
    drawSoon();
  };
};

// ---- open a comparison, and store the state in the URL
const openComparison = (number) => {
  comparison = data.comparisons[number];
  state.c = number;
  buildObjectives();
  openObjective();
  buildFilters();
  showDetail();
  showFigures();
  applyFilters();
  for (const id of ["tradeoff", "waits", "curves"]) {
    byId(id).removeAllListeners?.("plotly_click");
    byId(id).on?.("plotly_click", (event) => {
      const index = event.points[0].customdata;
      if (Number.isInteger(index)) choose(index);
    });
  }
};

// Store the state in the URL. Store the name of the comparison and the folder of the chosen group instead of their
// indices, because the indices change when runs are added.
const remember = () => {
  const chosen = state.chosen === null ? null : comparison.groups[state.chosen].folder;
  const kept = encodeURIComponent(JSON.stringify({ ...state, c: comparison.name, chosen }));
  try { history.replaceState(null, "", `#${kept}`); } catch { /* a browser may refuse it in an embedded page */ }
};

const restore = () => {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    state.c = Math.max(0, data.comparisons.findIndex(({ name }) => name === kept.c));
    const { groups, filters } = data.comparisons[state.c];
    const chosen = groups.findIndex((group) => group.folder === kept.chosen);
    state.chosen = chosen < 0 ? null : chosen;
    if (OBJECTIVES.includes(kept.objective)) state.objective = kept.objective;
    if (Object.hasOwn(AXES, kept.x)) state.x = kept.x;
    if (Object.hasOwn(QUALITIES, kept.y)) state.y = kept.y;
    for (const name of Object.keys(LIMITS)) if (Number.isFinite(kept[name])) state[name] = kept[name];
    for (const { name } of filters) if (Array.isArray(kept.off?.[name])) state.off[name] = kept.off[name].map(String);
    if (typeof kept.sort === "string") state.sort = kept.sort;
    state.down = kept.down === true;
    state.more = kept.more === true;
    for (const name of ["price", "speed"]) if (typeof kept[name] === "string") state[name] = kept[name];
  } catch { /* the URL contains no valid state: keep the default state */ }
};

// Reload the page after `seconds`, but wait until it has not been used for 5 s.
const reloadEvery = (seconds) => {
  let lastUse = 0;
  for (const event of ["pointerdown", "keydown", "input"]) addEventListener(event, () => { lastUse = Date.now(); });
  const reload = () => (Date.now() - lastUse > 5000 ? location.reload() : setTimeout(reload, 1000));
  setTimeout(reload, 1000 * seconds);
};

// ---- start
restore();
const menu = byId("comparison");
menu.replaceChildren(...data.comparisons.map(({ name }, number) =>
  element("option", { value: String(number), textContent: name, selected: number === state.c })));
menu.onchange = () => {
  Object.assign(state, { off: {}, comp: null, params: null, target: null, chosen: null });
  openComparison(Number(menu.value));
};
startTips();
startInputs();
openComparison(state.c);
const reloadSeconds = Number(document.body.dataset.reload);
if (reloadSeconds > 0) reloadEvery(reloadSeconds);

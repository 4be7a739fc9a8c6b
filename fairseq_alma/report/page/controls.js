// Build the menus, redraw the page after a change, and start the page.

// ---- after a change
// Show the best group within the budget, mark rows in the table, and draw the plots. If `withPlots` is false, draw the
// plots only after 0.3 s without another change, because drawing many points is slow.
let plotTimer = 0;
const draw = (withPlots = true) => {
  const best = showAnswer();
  markRows(best);
  showPair(best);
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

const choose = (index) => {
  state.chosen = index;
  showDetail();
  draw();
};

// Choose a group by its name, far above the details of the chosen group: go there.
const openDetail = (index) => {
  choose(index);
  byId("detail-section").scrollIntoView({ block: "start" });
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
    all: `Arrivals before the first stage count, with ${untrained}, so waiting costs something.` +
      (comparison.cer_from === 0 && comparison.vision ? " The error at t = 0, before anything arrived, counts, too." : ""),
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
  buildPair();
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

// Names of the entries of the state that are indices of groups.
const RUNS_IN_STATE = ["chosen", "first", "second"];

// Store the state in the URL. Store the name of the comparison, and folders and labels of groups, instead of their indices,
// because the indices change when runs are added. Seeds in folders side by side have a folder in common with other groups.
const remember = () => {
  const runs = Object.fromEntries(RUNS_IN_STATE.filter((name) => state[name] !== null).map((name) => {
    const { folder, label } = comparison.groups[state[name]];
    return [name, [folder, label]];
  }));
  const kept = encodeURIComponent(JSON.stringify({ ...state, c: comparison.name, ...runs }));
  try { history.replaceState(null, "", `#${kept}`); } catch { /* a browser may refuse it in an embedded page */ }
};

const restore = () => {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    const number = data.comparisons.findIndex(({ name }) => name === kept.c);
    if (number >= 0) state.c = number;
    const { groups, filters } = data.comparisons[state.c];
    for (const name of RUNS_IN_STATE) {
      if (!Array.isArray(kept[name])) continue;
      const [folder, label] = kept[name];
      const inFolder = groups.map((_, index) => index).filter((index) => groups[index].folder === folder);
      state[name] = inFolder.find((index) => groups[index].label === label) ?? inFolder[0] ?? null;
    }
    if (OBJECTIVES.includes(kept.objective)) state.objective = kept.objective;
    if (Object.hasOwn(AXES, kept.x)) state.x = kept.x;
    if (Object.hasOwn(QUALITIES, kept.y)) state.y = kept.y;
    for (const name of Object.keys(LIMITS)) if (Number.isFinite(kept[name])) state[name] = kept[name];
    for (const { name } of filters) if (Array.isArray(kept.only?.[name])) state.only[name] = kept.only[name].map(String);
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
menu.replaceChildren(...data.comparisons.map(({ name, groups }, number) =>
  element("option", {
    value: String(number), textContent: `${name} (${plural(groups.length, "run")})`, selected: number === state.c,
  })));
menu.onchange = () => {
  Object.assign(state, { only: {}, comp: null, params: null, target: null, chosen: null, first: null, second: null });
  openComparison(Number(menu.value));
};
startTips();
startInputs();
openComparison(state.c);
const reloadSeconds = Number(document.body.dataset.reload);
if (reloadSeconds > 0) reloadEvery(reloadSeconds);

// Show the best run, the filters, the table and the details of a run; redraw the page after a change; start the page.

// ---- the answer
const showAnswer = () => {
  const box = byId("answer"), ranked = visible.filter((one) => scoreOf(comparison.groups[one])[0] !== null);
  box.dataset.best = best ?? "";
  if (best === undefined) {
    box.replaceChildren("No run shown here is finished and has a score on validation data, so none can be chosen.");
    byId("meaning").textContent = "";
    return;
  }
  const scoreText = (one) => `${shown(scoreOf(one))} (${plural(one.seeds.length, "seed")})`;
  const group = comparison.groups[best], next = comparison.groups[ranked[1]], { name, score, meaning, explanation } = objective();
  const nextText = next ? `; the next is ${next.label} with ${scoreText(next)}` : "";
  box.replaceChildren(
    element("strong", {}, group.label),
    ` has the lowest ${score} of ${plural(ranked.length, "run")}, on validation data: ${scoreText(group)}${nextText}. ` +
      `On test data, its ${name} is ${shown(valueOf(group))}, its ${comparison.quality} ${withError(group.quality)}; ` +
      `it took ${withUnit(group.comp)}FLOP of training and has ${withUnit(group.params)} parameters.`);
  byId("meaning").textContent = `${name[0].toUpperCase()}${name.slice(1)}: ${meaning} ${explanation}`;
};

// ---- filters
// For each setting, runs with a checked value are shown. If no value is checked, all runs are shown.
const checkedValues = (name) => (Array.isArray(state.only?.[name]) ? state.only[name] : []);
const buildFilters = () => byId("filters").replaceChildren(...comparison.filters.map(({ name, values }) => {
  const boxes = values.map((value) => {
    const box = element("input", { type: "checkbox", value, checked: checkedValues(name).includes(value) });
    box.onchange = () => {
      const checked = [...box.closest("fieldset").querySelectorAll(":checked")].map((one) => one.value);
      state.only = { ...state.only, [name]: checked };
      applyFilters();
    };
    return element("label", { className: "chip" }, box, value);
  });
  const fieldset = element("fieldset", {}, element("legend", {}, explain(element("span", {}, name), name)), ...boxes);
  fieldset.dataset.filter = name;
  return fieldset;
}));

const isShown = (group) => comparison.filters.every(({ name }) => {
  const checked = checkedValues(name);
  return checked.length === 0 || checked.includes(group.settings[name] ?? "-");
});

const applyFilters = () => {
  visible = objective().ranking.filter((index) => isShown(comparison.groups[index]));
  byId("count").textContent = `${visible.length} of ${comparison.groups.length} runs`;
  buildTable();
  draw();
};

// ---- the table of all runs
// The columns are those of the table `summary`, which Python made, and the score of the chosen objective.
const columns = () => [
  { name: "run", text: ({ label }) => label },
  {
    name: `${inPercent(objective().score)} (validation)`, meaning: objective().explanation,
    text: (group) => withError(scoreOf(group), comparison.scale),
  },
  ...comparison.columns.map((name, i) => ({ name, text: ({ cells }) => cells[i] })),
];

// Return what a cell is sorted by: the number at its start, or its text.
const sortKey = ({ name, text }, group) => {
  if (name === "wall time") return group.wall_seconds ?? Infinity;
  const cell = text(group), number = Number.parseFloat(cell.replaceAll(",", "").replace(/^inf/, "Infinity"));
  return name === "run" || Number.isNaN(number) ? cell : number;
};

const buildTable = () => {
  const all = columns(), sorted = all.find(({ name }) => name === state.sort), keys = new Map();
  if (sorted) for (const index of visible) keys.set(index, sortKey(sorted, comparison.groups[index]));
  const order = !sorted ? visible : [...visible].sort((a, b) => {
    const [x, y] = [keys.get(a), keys.get(b)];
    if ((x === "") !== (y === "")) return x === "" ? 1 : -1; // unknown values last
    const sign = typeof x === "number" && typeof y === "number" ? x - y
      : String(x).localeCompare(String(y), "en", { numeric: true });
    return state.down ? -sign : sign;
  });
  const head = all.map(({ name, meaning }) => {
    const isSorted = name === state.sort, arrow = isSorted ? (state.down ? " ↓" : " ↑") : "";
    const button = element("button", { type: "button", textContent: name + arrow, onclick: () => {
      Object.assign(state, { sort: name, down: isSorted && !state.down });
      buildTable();
      draw();
    } });
    const cell = element("th", { scope: "col" }, explain(button, name.replace(/,.*/, ""), meaning));
    cell.setAttribute("aria-sort", isSorted ? (state.down ? "descending" : "ascending") : "none");
    return cell;
  });
  const rows = order.map((index) => {
    const group = comparison.groups[index], swatch = element("span", { className: "swatch" });
    swatch.style.background = group.colour;
    const cells = all.map(({ text }, i) => element("td", {}, ...(i === 0 ? [swatch] : []), text(group)));
    const onkeydown = (event) => { if (event.key === "Enter") choose(index); };
    const row = element("tr", { tabIndex: 0, onclick: () => choose(index), onkeydown }, ...cells);
    row.dataset.run = String(index);
    return row;
  });
  byId("runs").replaceChildren(element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
};

const markRows = () => {
  for (const row of byId("runs").tBodies[0].rows) {
    const index = Number(row.dataset.run);
    row.className = [...(index === best ? ["best"] : []), ...(index === chosen ? ["chosen"] : [])].join(" ");
  }
};

// ---- details of the chosen run
const settingsList = (settings) => element("dl", { className: "settings" },
  ...Object.entries(settings).map(([name, value]) =>
    element("div", {}, explain(element("dt", { textContent: name }), name), element("dd", { textContent: value }))));
const quotedForShell = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);

const showDetail = () => {
  const box = byId("detail"), group = comparison.groups[chosen];
  if (group === undefined) {
    box.replaceChildren(small("Choose a run: in a plot, or in the table."));
    return;
  }
  const command = group.command.map(quotedForShell).join(" ") || "provenance.json does not have it";
  box.replaceChildren(
    element("p", {}, element("strong", {}, group.label), ` · ${group.state} · seeds ${group.seeds.join(", ")} · ${group.wall_text}`),
    small(`${group.folder}${group.commit ? ` · commit ${group.commit}` : ""}`),
    ...(group.commit.endsWith("-dirty") ? [small("The code of this run had changes that its commit does not contain. " +
      "Runs of a newer version record them in provenance.json.")] : []),
    small("The command that made this run, with its commit:"), element("pre", { id: "command", textContent: command }),
    small("Settings in which the runs differ, and those of this learner:"), settingsList(group.settings),
    element("details", {}, element("summary", { className: "small", textContent: "Settings that all runs share" }),
      settingsList(comparison.common_settings)));
};

// Show the printed figures, which alma-report wrote beside the page.
const printed = (name) => {
  const path = `figures/${encodeURIComponent(comparison.slug)}/${encodeURIComponent(name)}`, title = name.replace(/_/g, " ");
  const image = element("img", { src: `${path}.png`, alt: title, loading: "lazy" });
  return element("figure", {}, element("a", { href: `${path}.png` }, image),
    element("figcaption", {}, `${title} `, element("a", { href: `${path}.pdf`, textContent: "PDF" })));
};

// The page of a single run begins with its last arrivals and its periods.
const showFigures = () => {
  const { arrivals, figures } = comparison, first = arrivals ? ["forgetting", "periods"].filter((name) => figures.includes(name)) : [];
  const row = (tag, cells) => element("tr", {}, ...cells.map((textContent) => element(tag, { textContent })));
  const others = figures.filter((name) => !first.includes(name));
  byId("arrivals-section").hidden = !arrivals;
  byId("arrivals").replaceChildren(...(arrivals ? [element("thead", {}, row("th", arrivals.columns)),
    element("tbody", {}, ...arrivals.rows.map((cells) => row("td", cells)))] : []));
  byId("arrivals-note").textContent = arrivals ? arrivals.note : "";
  byId("arrivals-figures").replaceChildren(...first.map(printed));
  byId("figures-section").hidden = others.length === 0;
  byId("figures").replaceChildren(...others.map(printed));
};

// ---- after a change
const draw = () => {
  best = visible.find((index) => scoreOf(comparison.groups[index])[0] !== null);
  chosen = comparison.groups.findIndex((group) => keyOf(group) === state.chosen);
  if (chosen < 0) chosen = best;
  showAnswer();
  markRows();
  showDetail();
  drawCurves();
  drawTradeoff();
  remember();
};

const choose = (index) => {
  state.chosen = keyOf(comparison.groups[index]);
  draw();
};

// Fill a menu with names, and call `onchange` after a choice.
const buildMenu = (id, names, key, onchange) => {
  const menu = byId(id);
  menu.replaceChildren(...Object.entries(names).map(([value, textContent]) =>
    element("option", { value, textContent, selected: state[key] === value })));
  menu.onchange = () => {
    state[key] = menu.value;
    onchange();
  };
};
const buildAxisMenu = (id, axes, key) => {
  if (!Object.hasOwn(axes, state[key])) state[key] = Object.keys(axes)[0];
  buildMenu(id, Object.fromEntries(Object.entries(axes).map(([value, { name }]) => [value, name()])), key, draw);
};

const openObjective = () => {
  if (!Object.hasOwn(comparison.objectives, state.objective)) state.objective = "all";
  buildMenu("objective", Object.fromEntries(Object.entries(comparison.objectives).map(([value, { name }]) => [value, name])),
    "objective", openObjective);
  buildAxisMenu("x-axis", AXES, "x");
  buildAxisMenu("y-axis", QUALITIES, "y");
  applyFilters();
};

const openComparison = () => {
  comparison = data.comparisons.find(({ name }) => name === state.c) ?? largest;
  buildFilters();
  showFigures();
  openObjective();
  for (const id of ["curves", "tradeoff"]) {
    byId(id).removeAllListeners?.("plotly_click");
    byId(id).on?.("plotly_click", ({ points: [{ customdata }] }) => { if (Number.isInteger(customdata)) choose(customdata); });
  }
};

// Store the state in the URL, so that a reload, a bookmark or a copied address shows the same.
const remember = () => {
  const kept = encodeURIComponent(JSON.stringify(state));
  try { history.replaceState(null, "", `#${kept}`); } catch { /* a browser may refuse it in an embedded page */ }
};

const restore = () => {
  try {
    const kept = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    for (const name of Object.keys(state)) if (typeof kept[name] === typeof state[name]) state[name] = kept[name];
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
document.querySelectorAll("[data-explain]").forEach((one) => explain(one, one.dataset.explain));
openComparison();
buildMenu("comparison", Object.fromEntries(data.comparisons.map(({ name, groups }) =>
  [name, `${name} (${plural(groups.length, "run")})`])), "c", () => {
  Object.assign(state, { only: {}, chosen: "" });
  openComparison();
});
byId("comparison").value = comparison.name;
const reloadSeconds = Number(document.body.dataset.reload);
if (reloadSeconds > 0) reloadEvery(reloadSeconds);

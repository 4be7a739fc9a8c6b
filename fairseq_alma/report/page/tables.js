// Show the details of the chosen group, and the table of all groups.

const settingsList = (settings) => element("dl", { className: "settings" },
  ...Object.entries(settings).map(([name, value]) =>
    element("div", {}, explain(element("dt", { textContent: name }), name), element("dd", { textContent: value }))));
const quotedForShell = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);

const showDetail = () => {
  const box = byId("detail");
  if (state.chosen === null || !comparison.groups[state.chosen]) {
    box.replaceChildren(small("Choose a run: in a plot, or in the table."));
    return;
  }
  const group = comparison.groups[state.chosen];
  const facts = ` · ${group.state} · seeds ${group.seeds.join(", ")} · ${wallOf(group)}`;
  const command = group.command.map(quotedForShell).join(" ") || "provenance.json does not have it";
  box.replaceChildren(
    element("p", {}, element("strong", { textContent: group.label }), facts),
    small(`${group.folder}${group.commit ? ` · commit ${group.commit}` : ""}`),
    ...(group.commit.endsWith("-dirty") ? [small("The code of this run had changes that its commit does not contain. " +
      "Runs of a newer version record them in provenance.json.")] : []),
    element("p", {}, element("button", {
      type: "button", className: "chip", id: "compare-chosen", textContent: "compare with the run on top",
      onclick: () => comparePair(null, state.chosen),
    })),
    small("The command that repeats this run:"), element("pre", { id: "command", textContent: command }),
    small("Settings in which the runs differ, and those of this learner:"),
    settingsList({ ...group.settings, ...group.own_settings }),
    element("details", {},
      element("summary", { className: "small", textContent: "Settings that all runs share" }),
      settingsList(comparison.common_settings)));
};

// ---- the table of all groups
let rowByIndex = new Map();      // index of a group -> row that the table shows, in the order of the table
let createdRows = new Map();     // index of a group -> row, for all rows created so far in this comparison

// Columns that only runs with an error matrix have: key of a group, and name.
const TRANSFER = [
  ["forgetting", "forgetting"], ["backward_transfer", "backward transfer"], ["forward_transfer", "forward transfer"],
];

// If the seeds of a run were trained together, its wall time is that of all of them.
const wallCell = ({ trained_together: isOfAll, wall_text: text, seeds }) =>
  (isOfAll ? `${text} (${plural(seeds.length, "seed")})` : text);

// Columns of the table. `of` returns the value that sorts the rows, `text` the text of the cell. `term` is the entry of
// the glossary. On a narrow screen, minor columns are hidden.
const COLUMNS = () => [
  { key: "label", name: "run", of: (group) => group.label, text: (group) => group.label, left: true },
  {
    key: "value", name: `${inPercent(objective().name)} (test)`, term: objective().name,
    of: (group) => meanOf(valueOf(group)), text: (group) => withError(valueOf(group), scale()),
  },
  {
    key: "score", name: inPercent(objective().score), term: objective().score,
    of: scoreOf, text: (group) => (scoreOf(group) === null ? "" : fixed(scaled(scoreOf(group)), 2)),
  },
  { key: "comp", name: "training FLOPs", term: "comp", of: (group) => group.comp, text: (group) => withUnit(group.comp) },
  { key: "seeds", name: "seeds", minor: true, of: (group) => group.seeds.length, text: (group) => String(group.seeds.length) },
  ...OBJECTIVES.filter((name) => name !== state.objective).map((name) => ({
    key: name, name: inPercent(comparison.objectives[name].name), term: comparison.objectives[name].name, minor: true,
    of: (group) => meanOf(group.value[name]), text: (group) => withError(group.value[name], scale()),
  })),
  {
    key: "quality", name: paperName(), term: paperTerm(), minor: true,
    of: (group) => meanOf(group.quality), text: (group) => withError(group.quality),
  },
  {
    key: "final_validation", name: inPercent("final validation"), term: "final validation error", minor: true,
    of: (group) => meanOf(group.final_validation), text: (group) => withError(group.final_validation, scale()),
  },
  ...(comparison.has_transfer ? TRANSFER : []).map(([key, name]) => ({
    key, name: `${name}, %`, minor: true, of: (group) => meanOf(group[key]), text: (group) => withError(group[key], 100),
  })),
  {
    key: "params", name: "parameters", minor: true,
    of: (group) => group.params, text: (group) => Math.round(group.params).toLocaleString("en"),
  },
  { key: "mem", name: "Mem", minor: true, of: (group) => group.mem, text: (group) => withUnit(group.mem) },
  { key: "wall", name: "wall time", minor: true, of: (group) => group.wall_seconds, text: wallCell },
  { key: "state", name: "state", minor: true, of: (group) => group.state, text: (group) => group.state, left: true },
];
const classOf = (column) => [column.left ? "text" : "", column.minor ? "minor" : ""].join(" ").trim();

const sortBy = (key) => {
  state.down = state.sort === key && !state.down;
  state.sort = key;
  buildTable();
  markRows(bestWithinBudget());
  remember();
};

const headCell = (column) => {
  const isSorted = column.key === state.sort;
  const arrow = isSorted ? (state.down ? " ↓" : " ↑") : "";
  const button = element("button", { textContent: column.name + arrow, onclick: () => sortBy(column.key) });
  const cell = element("th", { className: classOf(column), scope: "col" }, explain(button, column.term ?? column.name));
  cell.setAttribute("aria-sort", isSorted ? (state.down ? "descending" : "ascending") : "none");
  return cell;
};

// Build the table of the visible groups in sorted order. Reuse rows that exist, because creating many rows is slow.
const buildTable = () => {
  const columns = COLUMNS(), sorted = columns.find((column) => column.key === state.sort) ?? columns[0];
  const order = [...visible].sort((a, b) => {
    const x = sorted.of(comparison.groups[a]), y = sorted.of(comparison.groups[b]);
    if (x === null || y === null || x === y) return (x === null) - (y === null) || a - b;  // sort unknown values last
    const sign = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return state.down ? -sign : sign;
  });
  rowByIndex = new Map(order.map((index) => [index, createdRows.get(index) ?? createRow(columns, index)]));
  const head = element("tr", {}, ...columns.map(headCell));
  byId("runs").replaceChildren(
    element("caption", { className: "hidden", textContent: "All runs. Each column head sorts the table." }),
    element("thead", {}, head), element("tbody", {}, ...rowByIndex.values()));
};

const createRow = (columns, index) => {
  const group = comparison.groups[index];
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = group.colour;
  const cells = columns.map((column, i) =>
    element("td", { className: classOf(column) }, ...(i === 0 ? [swatch] : []), column.text(group)));
  const onkeydown = (event) => { if (event.key === "Enter") choose(index); };
  const row = element("tr", { tabIndex: 0, onclick: () => choose(index), onkeydown }, ...cells);
  row.dataset.run = String(index);
  createdRows.set(index, row);
  return row;
};

// Mark the row of the best group, the row of the chosen group, and the rows of groups that exceed the budget.
const markRows = (best) => {
  for (const [index, row] of rowByIndex) {
    const names = [];
    if (index === best) names.push("best");
    if (!isWithinBudget(comparison.groups[index])) names.push("beyond");
    if (index === state.chosen) names.push("chosen");
    const className = names.join(" ");
    if (row.className !== className) row.className = className;
  }
};

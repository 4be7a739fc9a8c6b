// Show the texts and tables of the page: the best group within the budget, its alternatives, the details of the chosen
// group, and the table of all groups.

// ---- the best group
// Show the best group within the budget and its alternatives. Return the index of the best group, or null.
const showAnswer = () => {
  const box = byId("answer"), best = bestWithinBudget();
  box.dataset.best = best === null ? "" : String(best);
  if (best === null) {
    const closest = closestToBudget();
    const reason = candidates().length
      ? `No run keeps to this budget${closest.length ? `: within the other limits, ${closest.join("; ")}` : ""}. ` +
        "Move a slider to the right."
      : "No run shown here is finished and has validation numbers, so none can be chosen.";
    box.replaceChildren(element("p", { className: "best", textContent: reason }));
    byId("alternatives").replaceChildren();
    return best;
  }
  const group = comparison.groups[best], numSeeds = group.seeds.length;
  const numWithin = candidates().filter((index) => isWithinBudget(comparison.groups[index])).length;
  const facts = `On test data: ${qualityName()} ${withError(group.quality)}, ` +
    `${finalName()} ${withError(group.final, percent())}${comparison.vision ? " %" : ""}; ` +
    `${withUnit(group.params)} parameters, ${withUnit(group.comp)}FLOP of training, ${group.wall_text} ` +
    `(${numSeeds} seed${numSeeds > 1 ? "s" : ""}).`;
  const score = `${comparison.rule.name} (${fixed(scoreOf(group), 2)}${scoreUnit()})`;
  const rule = (state.final === null ? `Lowest ${score} of ${numWithin} runs within the budget. `
    : `The cheapest of ${numWithin} runs that reach the target within the budget; its ${score}. `) +
    comparison.rule.explanation;
  const name = element("button", { textContent: group.label, onclick: () => choose(best) });
  box.replaceChildren(element("p", { className: "best" }, name), element("p", { textContent: facts }), small(rule));
  showAlternatives(group);
  return best;
};

// Show the alternatives to a group: the groups that differ from it in a single decision, such as the wait.
const showAlternatives = (group) => {
  const table = byId("alternatives");
  if (!group.alternatives.length) {
    table.replaceChildren();
    return;
  }
  const names = ["decision", "run", qualityName(), `difference in ${qualityName()}`, "verdict",
    `difference in ${finalName()}`,
    "training FLOPs", "parameters"];
  const head = element("tr", {}, ...names.map((name, i) =>
    element("th", { textContent: name, className: i < 2 ? "text" : "" })));
  const ratio = (a, b) => (b > 0 ? `× ${+(a / b).toPrecision(3)}` : "");
  const rows = group.alternatives.map(([change, index, difference]) => {
    const other = comparison.groups[index];
    const gap = difference === null ? NaN : difference.mean;
    const verdict = difference === null ? "" : difference.verdict;
    const finalGap = percent() * (other.final[0] - group.final[0]);
    const cells = [
      { textContent: change, className: "text" },
      { textContent: other.label, className: "text" },
      { textContent: withError(other.quality) },
      {
        textContent: difference === null ? "" : signed(gap, withError([gap, difference.margin])), title: verdict,
        className: verdict === "worse" || verdict === "better" ? verdict : "",
      },
      { textContent: verdict, className: "text" },
      { textContent: signed(finalGap, fixed(finalGap, 2)) },
      { textContent: ratio(other.comp, group.comp) },
      { textContent: ratio(other.params, group.params) },
    ];
    const row = element("tr", {}, ...cells.map((cell) => element("td", cell)));
    row.dataset.run = String(index);
    return row;
  });
  const caption = element("caption", {
    textContent: "Runs that differ in one decision (test data). The difference is paired over the seeds that both runs " +
      "have, ± its 95% interval; the verdict says whether it is larger than that.", className: "small", style: "text-align:left",
  });
  table.replaceChildren(caption, element("thead", {}, head), element("tbody", {}, ...rows));
};

// ---- the details of the chosen group
const settingsList = (settings) => element("dl", { className: "settings" },
  ...Object.entries(settings).map(([name, value]) =>
    element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }))));
const quotedForShell = (word) => (/^[\w@%+=:,./\-[\]]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`);

const showDetail = () => {
  const box = byId("detail");
  if (state.chosen === null || !comparison.groups[state.chosen]) {
    box.replaceChildren(small("Choose a run: in a plot, or in the table."));
    return;
  }
  const group = comparison.groups[state.chosen];
  const facts = ` · ${group.state} · seeds ${group.seeds.join(", ")} · ${group.wall_text}`;
  const command = group.command.map(quotedForShell).join(" ") || "provenance.json does not have it";
  box.replaceChildren(
    element("p", {}, element("strong", { textContent: group.label }), facts),
    small(`${group.folder}${group.commit ? ` · commit ${group.commit}` : ""}`),
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

// Columns of the table. `of` returns the value that sorts the rows, `text` the text of the cell.
const COLUMNS = () => [
  { key: "label", name: "run", of: (group) => group.label, text: (group) => group.label, left: true },
  { key: "seeds", name: "seeds", of: (group) => group.seeds.length, text: (group) => String(group.seeds.length) },
  {
    key: "quality", name: qualityName(),
    of: (group) => meanOf(group.quality), text: (group) => withError(group.quality),
  },
  {
    key: "final", name: finalName() + (comparison.vision ? ", %" : ""),
    of: (group) => meanOf(group.final), text: (group) => withError(group.final, percent()),
  },
  {
    key: "final_validation", name: "final validation",
    of: (group) => meanOf(group.final_validation), text: (group) => withError(group.final_validation, percent()),
  },
  {
    key: "score", name: scoreName(),
    of: scoreOf, text: (group) => (group.score === null ? "" : fixed(scoreOf(group), 2)),
  },
  ...(comparison.has_transfer ? TRANSFER : []).map(([key, name]) => ({
    key, name: `${name}, %`, of: (group) => meanOf(group[key]), text: (group) => withError(group[key], 100),
  })),
  {
    key: "params", name: "parameters",
    of: (group) => group.params, text: (group) => Math.round(group.params).toLocaleString("en"),
  },
  { key: "mem", name: "Mem", of: (group) => group.mem, text: (group) => withUnit(group.mem) },
  { key: "comp", name: "training FLOPs", of: (group) => group.comp, text: (group) => withUnit(group.comp) },
  { key: "wall", name: "wall time", of: (group) => group.wall_seconds, text: (group) => group.wall_text },
  { key: "state", name: "state", of: (group) => group.state, text: (group) => group.state, left: true },
];

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
  const cell = element("th", { className: column.left ? "text" : "" }, button);
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
  byId("runs").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rowByIndex.values()));
};

const createRow = (columns, index) => {
  const group = comparison.groups[index];
  const swatch = element("span", { className: "swatch" });
  swatch.style.background = group.colour;
  const cells = columns.map((column, i) =>
    element("td", { className: column.left ? "text" : "" }, ...(i === 0 ? [swatch] : []), column.text(group)));
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

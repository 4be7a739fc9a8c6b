// Compare two runs that the user chooses.

// Results of the comparison on test data, paired over seeds: name, values of a group (one for each seed), and text.
const PAIR_RESULTS = () => [
  { name: paperName(), term: paperTerm(), of: (group) => group.by_seed.quality, factor: 1 },
  ...OBJECTIVES.map((name) => ({
    name: inPercent(comparison.objectives[name].name), term: comparison.objectives[name].name,
    of: (group) => group.test[name], factor: scale(),
  })),
];

const pairIndices = (best) => [state.first ?? best, state.second];

// Select two runs, and show the comparison. `first` null: the run on top.
const comparePair = (first, second) => {
  Object.assign(state, { first, second });
  buildPair();
  draw();
  byId("pair-section").scrollIntoView({ block: "nearest" });
};

// Fill the two menus with all runs of the comparison, also those that the filters hide.
const buildPair = () => {
  for (const [name, nothing] of [["first", "the run on top"], ["second", "choose a run"]]) {
    const groups = new Map();
    comparison.groups.forEach((group, index) => {
      const option = element("option", { value: String(index), textContent: group.label, selected: index === state[name] });
      groups.set(group.learner, [...(groups.get(group.learner) ?? []), option]);
    });
    const menu = byId(`pair-${name}`);
    menu.replaceChildren(element("option", { value: "", textContent: nothing, selected: state[name] === null }),
      ...[...groups].map(([label, options]) => element("optgroup", { label }, ...options)));
    menu.onchange = () => {
      state[name] = menu.value === "" ? null : Number(menu.value);
      draw();
    };
  }
};

const pairRow = (name, term, ...cells) => element("tr", {},
  element("th", { className: "text", scope: "row" }, termed(name, term)),
  ...cells.map(([textContent, className = ""]) => element("td", { textContent, className })));

// Return the row of a test result: its value in both runs, the difference of the second from the first, and the verdict.
const resultRow = (first, second, { name, term, of, factor }) => {
  const gap = pairedDifference(first, second, of), verdict = gap === null ? "not measured" : gap.verdict;
  const value = (group) => (of(group).length ? withError(estimateOf(of(group)), factor) : "");
  const text = gap === null ? "" : signed(gap.mean, withError([gap.mean, gap.margin], factor));
  const colour = verdict === "better" || verdict === "worse" ? verdict : "";
  return pairRow(name, term, [value(first)], [value(second)], [text, colour], [verdict, "text"]);
};

// Return the row of a cost. A cost has no noise if it is the same number for all seeds.
const costRow = (name, term, first, second, gap) => {
  const verdict = gap === null ? "not measured" : gap.mean === 0 ? "equal"
    : gap.margin !== null && Math.abs(gap.mean) <= gap.margin ? "no clear difference" : gap.mean > 0 ? "more" : "fewer";
  const text = gap === null ? "" : `${signed(gap.mean, withUnit(gap.mean))} (${ratio(second, first)})`;
  return pairRow(name, term, [withUnit(first)], [withUnit(second)], [text], [verdict, "text"]);
};

// Return the mean and the standard error of the values of the seeds.
const estimateOf = (values) => {
  const middle = mean(values);
  if (values.length < 2 || !values.every(Number.isFinite)) return [middle, null];
  const variance = values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1);
  return [middle, Math.sqrt(variance / values.length)];
};

// Show the comparison of the two runs.
const showPair = (best) => {
  const [first, second] = pairIndices(best).map((index) => (index === null ? null : comparison.groups[index]));
  const table = byId("pair"), note = byId("pair-note");
  if (!first || !second || first === second) {
    table.replaceChildren();
    note.textContent = second && first === second ? "These are the same run. Choose two different runs."
      : !first ? "No run is within the budget. Choose the first run." : "Choose a second run.";
    return;
  }
  const head = element("tr", {}, ...[["", "text"], [first.label], [second.label], ["difference"], ["verdict", "text"]]
    .map(([textContent, className = ""]) => element("th", { textContent, scope: "col", className })));
  const params = { mean: second.params - first.params, margin: null };
  const rows = [
    ...PAIR_RESULTS().map((result) => resultRow(first, second, result)),
    costRow("training FLOPs", "comp", first.comp, second.comp, pairedDifference(first, second, (group) => group.by_seed.comp)),
    costRow("parameters", "parameters", first.params, second.params, params),
  ];
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  const gap = difference(first, second, "test"), pairs = gap === null ? 0 : gap.pairs;
  note.textContent = `Judged by test data. The difference is ${second.label} minus ${first.label}` + (pairs > 1
    ? `, paired over the ${pairs} seeds that both have, ± its 95% interval. If it is not larger than this interval, there is no clear ` +
      "difference. The verdict is about the second run. The ± of a run is its standard error."
    : pairs === 1 ? ". Both runs have one seed in common, which cannot show how large the noise is."
      : ". The runs have no seed in common, so it is the difference of their means.") +
    (first.twin === second.twin ? " Both have the same results, because the computation is the same." : "");
};

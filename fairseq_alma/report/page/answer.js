// Show the answer: the best group within the budget, how sure this is, and its alternatives.

// Names of the decisions, and the entries of the glossary that explain them.
const DECISIONS = {
  wait_longer: ["wait longer", "wait"], wait_less: ["do not wait, or wait less", "wait"], replay: ["replay", "replay"],
  growth: ["grow, or do not grow, at equal cost", "growth"], same_size: ["one fixed model of the same size", "SM"],
  more_members: ["more members", "member"],
};

// Show the answer and its alternatives. Return the index of the best group, or null.
const showAnswer = () => {
  const box = byId("answer"), best = bestWithinBudget();
  box.dataset.best = best === null ? "" : String(best);
  if (best === null) {
    const closest = closestToBudget();
    const reason = candidates().length
      ? `No run keeps to this budget${closest.length ? `: within the other limits, ${closest.join("; ")}` : ""}. ` +
        "Raise a limit."
      : "No run shown here is finished and has validation numbers, so none can be chosen.";
    box.replaceChildren(element("p", { className: "best", textContent: reason }));
    box.dataset.rivals = "";
    byId("alternatives").replaceChildren();
    showCosts([]);
    return best;
  }
  const group = comparison.groups[best], name = element("button", { textContent: group.label, onclick: () => openDetail(best) });
  box.replaceChildren(
    element("p", { className: "best" }, name), element("p", { id: "rule", textContent: ruleOf(group) }),
    element("p", { id: "facts", textContent: factsOf(group) }), ...doubts(best), ...certainty(best), ...sameResults(best),
    small(...withTerm(objective().explanation, "prequential score", "prequential error")));
  const shown = showAlternatives(best);
  showCosts([best, ...(state.chosen === null || state.chosen === best ? [] : [state.chosen]), ...shown]);
  return best;
};

// Return the test results and the cost of a group as a sentence.
const factsOf = (group) => {
  const { all, after, final } = comparison.objectives, numSeeds = group.seeds.length;
  const results = [
    `${objective().name} ${withError(valueOf(group), scale())}${unit()}`,
    ...[all, after, final].filter((one) => one !== objective() && one === final)
      .map((one) => `${one.name} ${withError(group.value.final, scale())}${unit()}`),
    comparison.vision ? `CER ${withError(group.quality)}` : `arithmetic mean, as in the paper, ${withError(group.quality)}`,
  ];
  return `Measured on test data, mean of ${plural(numSeeds, "seed")}: ${results.join("; ")}. Cost of each seed: ` +
    `${withUnit(group.params)} parameters, ${withUnit(group.comp)}FLOP of training. Wall time: ${wallOf(group)}.`;
};

const scoreText = (group) => `${fixed(scaled(scoreOf(group)), 2)}${unit()}`;

// Say by which data the group was chosen, and which other groups reach the target at the same cost.
const ruleOf = (group) => {
  const within = candidates().filter((index) => isWithinBudget(comparison.groups[index]));
  const rule = "Chosen by validation data, never by test data: ";
  if (state.target === null) {
    return `${rule}the lowest ${objective().score} (${scoreText(group)}) of ${plural(within.length, "run")} within the budget.`;
  }
  const ties = within.filter((index) => comparison.groups[index] !== group &&
    comparison.groups[index].comp <= group.comp * data.constants.same_step);
  return `${rule}the cheapest of ${plural(within.length, "run")} within the budget whose ${objective().score} reaches the ` +
    `target; that of this run is ${scoreText(group)}.` +
    (ties.length ? ` Others reach it at the same training cost, within ${Math.round(100 * (data.constants.same_step - 1))} %: ` +
      `${listed(ties)}.` : "");
};

// Return a difference on test data as words, such as "worse (+0.28 ± 0.09 points)".
const verdictText = (gap) => {
  if (gap === null) return "not measured";
  const points = comparison.vision ? " points" : "";
  const amount = `${signed(gap.mean, withError([gap.mean, gap.margin], scale()))}${points}`;
  return gap.verdict === "one seed" ? `${amount}, from one seed` : `${gap.verdict} (${amount})`;
};

// Name the runs that computed the same as the best one, so that a reader does not look for a difference.
const sameResults = (best) => {
  const group = comparison.groups[best];
  const same = visible.filter((index) => index !== best && comparison.groups[index].twin === group.twin);
  return same.length ? [small(`The same results, number for number, because the computation is the same: ${listed(same)}.`)] : [];
};

// Number of runs that a sentence or a list of the answer names.
const MAX_LISTED = 3;
const listed = (indices) => indices.slice(0, MAX_LISTED).map((index) => comparison.groups[index].label).join("; ") +
  (indices.length > MAX_LISTED ? `; and ${indices.length - MAX_LISTED} more` : "");

// Return a list of rivals: their scores, and what the test data say about them.
const rivalList = (group, indices) => element("ul", {}, ...indices.slice(0, MAX_LISTED).map((index) => {
  const other = comparison.groups[index];
  return element("li", {}, element("button", { type: "button", textContent: other.label, onclick: () => openDetail(index) }),
    `: validation ${scoreText(other)} (this run ${scoreText(group)}); test: ${verdictText(difference(group, other, "test"))}`);
}), ...(indices.length > MAX_LISTED
  ? [element("li", { textContent: `and ${plural(indices.length - MAX_LISTED, "more run")}` })] : []));

// With a target: return whether a group reaches it on test data, within the other limits.
const reachesByTest = (group) => {
  const limits = Object.keys(LIMITS).filter((name) => name !== "target" && state[name] !== null);
  const tested = group.finished ? meanOf(valueOf(group)) : null;
  return tested !== null && tested <= state.target && limits.every((name) => LIMITS[name].of(group) <= state[name]);
};

// With a target: return the cheapest visible group that reaches it on test data, or null. It is shown, never chosen.
const cheapestByTest = () => {
  const reaching = visible.map((index) => comparison.groups[index]).filter(reachesByTest);
  const keyOfGroup = (group) => [group.comp, meanOf(valueOf(group))];
  const isCheaper = (group, other) => other === null || isLess(keyOfGroup(group), keyOfGroup(other));
  return reaching.reduce((least, group) => (isCheaper(group, least) ? group : least), null);
};

// Return what makes the answer doubtful: runs that the validation data cannot tell from it, and test results.
const doubts = (best) => {
  const rivals = rivalsOf(best), group = comparison.groups[best], paragraphs = [];
  byId("answer").dataset.rivals = rivals.map(({ index }) => index).join(",");
  const add = (text, ...more) => paragraphs.push(element("div", { className: "doubt" }, text, ...more));
  const of = (reason) => rivals.filter((rival) => rival.reason === reason).map(({ index }) => index);
  const noisy = of("noise"), biased = of("bias");
  if (noisy.length) {
    const others = noisy.length > 1 ? `one of ${noisy.length} other runs` : "another run";
    add(`The validation data cannot tell whether ${others} within the budget is better: the difference in ` +
      `${objective().score} is no larger than the variation between seeds. ` +
      "What the test data say, which do not choose:",
    rivalList(group, noisy));
  }
  if (biased.length) {
    add("The validation data cannot tell whether a longer wait is better: the " + objective().score + " of a short wait can be " +
      `up to ${Math.round(100 * data.constants.bias)} % too low (as measured on MNIST), because the data that measure it also ` +
      "chose the epoch of each stage. What the test data say, which do not choose:",
    rivalList(group, biased));
  }
  if (objective().noise === null && candidates().length > 1 && state.target === null) {
    add("The validation data cannot tell how much of the differences is noise: all runs have one seed.");
  }
  const tested = meanOf(group.value[state.objective]);
  if (state.target !== null) {
    const isMissed = tested !== null && tested > state.target, other = cheapestByTest();
    if (isMissed) add(`On test data, this run misses the target: ${fixed(scaled(tested), 2)}${unit()}.`);
    const ties = other === null ? [] : visible.filter((index) => comparison.groups[index] !== other &&
      reachesByTest(comparison.groups[index]) && comparison.groups[index].comp <= other.comp * data.constants.same_step);
    if (other === null) {
      add("On test data, no run shown here reaches the target within the budget.");
    } else if (isMissed || other.comp < group.comp) {
      add(`On test data, which do not choose, the cheapest run that reaches the target is ${other.label}: ` +
        `${objective().name} ${withError(valueOf(other), scale())}${unit()}, ${withUnit(other.comp)}FLOP of training.` +
        (ties.length ? ` Others reach it at the same training cost: ${listed(ties)}.` : ""));
    }
  }
  if (group.seeds.length === 1 && objective().noise !== null && state.target === null) {
    add("This run has one seed. How much its score varies is estimated from the other runs.");
  }
  // The lists above have the test results of the first rivals.
  const isNamed = (index) => noisy.slice(0, MAX_LISTED).includes(index) || biased.slice(0, MAX_LISTED).includes(index);
  // Compare first what is fast to compute.
  const isLower = (other) => tested !== null && other.finished && (meanOf(valueOf(other)) ?? Infinity) < tested;
  const better = visible.filter((index) => isLower(comparison.groups[index]) && isWithinBudget(comparison.groups[index]))
    .filter((index) => !isNamed(index) && difference(group, comparison.groups[index], "test")?.verdict === "better")
    .sort((a, b) => meanOf(valueOf(comparison.groups[a])) - meanOf(valueOf(comparison.groups[b])) || a - b);
  if (better.length) {
    add(`On test data, which do not choose, ${better.length > 1 ? "other runs" : "another run"} within the budget ` +
      `${better.length > 1 ? "are" : "is"} better than the run on top: ${listed(better)}.`);
  }
  return paragraphs;
};

// Say it if nothing is doubtful. `doubts` has stored the rivals.
const certainty = (best) => {
  const numOthers = candidates().filter((index) => index !== best && isWithinBudget(comparison.groups[index])).length;
  const isSure = state.target === null && numOthers > 0 && !byId("answer").dataset.rivals && objective().noise !== null;
  const others = numOthers > 1 ? `all ${numOthers} other runs` : "the other run";
  return isSure ? [small(`The validation data are clear: the ${objective().score} of ${others} within the budget is worse by ` +
    "more than the variation between seeds.")] : [];
};

// ---- alternatives
const ratio = (a, b) => (b > 0 ? `× ${+(a / b).toPrecision(3)}` : "");

// Show the alternatives to the best group: for each decision, runs that differ in it, or why there are none. Return the
// indices of the runs.
const showAlternatives = (best) => {
  const group = comparison.groups[best], table = byId("alternatives"), shown = [], rows = [];
  const names = [["run", "text"], [`${inPercent(objective().name)} (test)`, "minor"], ["difference (test)"],
    ["verdict (test)", "text"], ["training FLOPs"], ["parameters", "minor"]];
  const head = element("tr", {}, ...names.map(([textContent, className = ""]) =>
    element("th", { textContent, scope: "col", className })));
  for (const [change, found] of Object.entries(group.alternatives)) {
    const title = element("tr", {}, element("th", { className: "text decision", scope: "rowgroup", colSpan: names.length },
      termed(...DECISIONS[change])));
    if (!found.runs) {
      const text = found.reason ? [`does not apply: ${found.reason}`]
        : found.command === "" ? ["not run"]
        : ["not run. The command that runs it:", element("pre", { className: "command", textContent: found.command })];
      const cell = element("td", { className: "text missing", colSpan: names.length }, ...text);
      rows.push(element("tbody", {}, title, element("tr", {}, cell)));
      continue;
    }
    const score = (index) => scoreOf(comparison.groups[index]) ?? Infinity;
    const runs = [...found.runs].sort((a, b) => score(a) - score(b) || a - b).slice(0, data.constants.max_alternatives);
    shown.push(...runs);
    rows.push(element("tbody", {}, title, ...runs.map((index, i) => {
      const row = element("tr", {}, ...alternativeCells(group, index, found, i, runs));
      row.dataset.run = String(index);
      row.dataset.change = change;
      return row;
    })));
  }
  const caption = element("caption", {
    className: "small", textContent: "Alternatives to this run, judged by test data. The run on top was chosen by " +
      "validation data, so an alternative can be better on test data. The difference is the alternative minus the run on " +
      "top, paired over the seeds that both have, ± its 95% interval. If it is not larger than this interval, there is no " +
      "clear difference. Equal cost: training FLOPs within 25 %. Same size: parameters, averaged over the stream, within 25 %.",
  });
  table.replaceChildren(caption, element("thead", {}, head), ...rows);
  return [...new Set(shown)];
};

const alternativeCells = (group, index, found, position, runs) => {
  const other = comparison.groups[index], gap = difference(group, other, "test");
  const verdict = gap === null ? "" : gap.verdict;
  const hidden = visible.includes(index) ? "" : " (hidden by the filter)";
  const more = position === runs.length - 1 && found.number > runs.length ? ` (and ${found.number - runs.length} more)` : "";
  const text = gap === null ? "" : signed(gap.mean, withError([gap.mean, gap.margin], scale()));
  return [
    element("td", { className: "text run" },
      element("button", { type: "button", textContent: other.label, onclick: () => openDetail(index) }), hidden + more),
    element("td", { className: "minor", textContent: withError(valueOf(other), scale()) }),
    element("td", { className: verdict === "worse" || verdict === "better" ? verdict : "", textContent: text }),
    element("td", { className: "text", textContent: verdict }),
    element("td", { textContent: ratio(other.comp, group.comp) }),
    element("td", { className: "minor", textContent: ratio(other.params, group.params) }),
  ];
};

// Show the answer: the best group within the budget, how sure this is, its alternatives, and what they cost.

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
        "Move a slider to the right."
      : "No run shown here is finished and has validation numbers, so none can be chosen.";
    box.replaceChildren(element("p", { className: "best", textContent: reason }));
    box.dataset.rivals = "";
    byId("alternatives").replaceChildren();
    showCosts([]);
    return best;
  }
  const group = comparison.groups[best], name = element("button", { textContent: group.label, onclick: () => choose(best) });
  box.replaceChildren(
    element("p", { className: "best" }, name), element("p", { textContent: factsOf(group) }), ...doubts(best),
    small(ruleOf(group)));
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
  return `On test data: ${results.join("; ")}. ${withUnit(group.params)} parameters, ${withUnit(group.comp)}FLOP of ` +
    `training, ${group.wall_text} (${numSeeds} seed${numSeeds > 1 ? "s" : ""}).`;
};

const ruleOf = (group) => {
  const score = `${objective().score} (${fixed(scaled(scoreOf(group)), 2)}${unit()})`;
  const numWithin = candidates().filter((index) => isWithinBudget(comparison.groups[index])).length;
  return (state.target === null ? `Lowest ${score} of ${numWithin} runs within the budget. `
    : `The cheapest of ${numWithin} runs within the budget whose ${objective().score} reaches the target; that of this ` +
      `run is ${fixed(scaled(scoreOf(group)), 2)}${unit()}. `) + objective().explanation;
};

const listed = (indices) => indices.slice(0, 3).map((index) => comparison.groups[index].label).join("; ") +
  (indices.length > 3 ? `; and ${indices.length - 3} more` : "");

// Return what makes the answer doubtful: runs that the validation data cannot tell from it, and test results.
const doubts = (best) => {
  const rivals = rivalsOf(best), group = comparison.groups[best], paragraphs = [];
  byId("answer").dataset.rivals = rivals.map(({ index }) => index).join(",");
  const add = (text) => paragraphs.push(element("p", { className: "doubt", textContent: text }));
  const of = (reason) => rivals.filter((rival) => rival.reason === reason).map(({ index }) => index);
  const noisy = of("noise"), biased = of("bias");
  if (noisy.length) {
    add(`The validation data cannot tell: the ${objective().score} of ${noisy.length} other run${noisy.length > 1 ? "s" : ""} within ` +
      `the budget differs from that of this run by no more than the seeds do: ${listed(noisy)}.`);
  }
  if (biased.length) {
    add(`The validation data cannot tell whether a longer wait is better: ${listed(biased)}. The score of a short wait can be up to ` +
      `${Math.round(100 * data.constants.bias)} % too low here, because the same data chose the epochs.`);
  }
  if (objective().noise === null && candidates().length > 1 && state.target === null) {
    add("The validation data cannot tell how much of the differences is noise: all runs have one seed.");
  }
  const tested = meanOf(group.value[state.objective]);
  if (state.target !== null && tested !== null && tested > state.target) {
    add(`On test data, this run misses the target: ${fixed(scaled(tested), 2)}${unit()}. Give a lower target to be sure.`);
  }
  if (group.seeds.length === 1 && objective().noise !== null && state.target === null) {
    add("This run has one seed. How much its score varies is estimated from the other runs.");
  }
  const better = Object.values(group.alternatives).flatMap(({ runs }) => runs ?? [])
    .filter((index) => difference(group, comparison.groups[index], "test")?.verdict === "better")
    .filter((index) => isWithinBudget(comparison.groups[index]));
  if (better.length) {
    add(`On test data, which do not choose, ${better.length > 1 ? "these runs are" : "this run is"} better within the ` +
      `budget: ${listed([...new Set(better)])}.`);
  }
  return paragraphs;
};

// ---- alternatives
const ratio = (a, b) => (b > 0 ? `× ${+(a / b).toPrecision(3)}` : "");

// Show the alternatives to the best group: for each decision, runs that differ in it, or why there are none. Return the
// indices of the runs.
const showAlternatives = (best) => {
  const group = comparison.groups[best], table = byId("alternatives"), shown = [], rows = [];
  const names = [["decision"], ["run"], [inPercent(objective().name), "minor"],
    ["difference"], ["verdict"], ["training FLOPs"], ["parameters", "minor"]];
  const head = element("tr", {}, ...names.map(([textContent, more = ""], i) =>
    element("th", { textContent, scope: "col", className: `${i < 2 || i === 4 ? "text" : ""} ${more}`.trim() })));
  for (const [change, found] of Object.entries(group.alternatives)) {
    const title = (rowSpan) => element("th", { className: "text decision", scope: "rowgroup", rowSpan },
      termed(...DECISIONS[change]));
    if (!found.runs) {
      const text = found.reason ? [`does not apply: ${found.reason}`]
        : ["not run. The command that runs it:", element("pre", { className: "command", textContent: found.command })];
      const cell = element("td", { className: "text missing", colSpan: names.length - 1 }, ...text);
      rows.push(element("tbody", {}, element("tr", {}, title(1), cell)));
      continue;
    }
    const score = (index) => scoreOf(comparison.groups[index]) ?? Infinity;
    const runs = [...found.runs].sort((a, b) => score(a) - score(b) || a - b).slice(0, data.constants.max_alternatives);
    shown.push(...runs);
    rows.push(element("tbody", {}, ...runs.map((index, i) => {
      const row = element("tr", {}, ...(i === 0 ? [title(runs.length)] : []), ...alternativeCells(group, index, found, i, runs));
      row.dataset.run = String(index);
      row.dataset.change = change;
      return row;
    })));
  }
  const caption = element("caption", {
    className: "small", textContent: "Alternatives to this run (test data). The difference is paired over the seeds that " +
      "both runs have, ± its 95% interval; the verdict says whether it is larger than that. Equal cost: training FLOPs " +
      "within 25 %. Same size: parameters, averaged over the stream, within 25 %.",
  });
  table.replaceChildren(caption, element("thead", {}, head), ...rows);
  return [...new Set(shown)];
};

const alternativeCells = (group, index, found, position, runs) => {
  const other = comparison.groups[index], gap = difference(group, other, "test");
  const verdict = gap === null ? "" : gap.verdict;
  const more = position === runs.length - 1 && found.number > runs.length ? ` (and ${found.number - runs.length} more)` : "";
  const text = gap === null ? "" : signed(gap.mean, withError([gap.mean, gap.margin], scale()));
  return [
    element("td", { className: "text run" },
      element("button", { type: "button", textContent: other.label, onclick: () => choose(index) }), more),
    element("td", { className: "minor", textContent: withError(valueOf(other), scale()) }),
    element("td", { className: verdict === "worse" || verdict === "better" ? verdict : "", textContent: text }),
    element("td", { className: "text", textContent: verdict }),
    element("td", { textContent: ratio(other.comp, group.comp) }),
    element("td", { className: "minor", textContent: ratio(other.params, group.params) }),
  ];
};

// ---- cost in time and money
// Show what runs cost: measured training time, and the price at the given price of an hour. With a given speed of a
// machine, the time is computed from the FLOPs.
const showCosts = (indices) => {
  const price = Number.parseFloat(state.price), speed = Number.parseFloat(state.speed);
  const names = ["run", "training FLOPs", "training time", "FLOPs per second", "price"];
  const head = element("tr", {}, ...names.map((textContent, i) =>
    element("th", { textContent, scope: "col", className: i === 0 ? "text" : "" })));
  const rows = indices.map((index) => {
    const group = comparison.groups[index], measured = hoursOf(group);
    const hours = speed > 0 ? group.comp / (speed * 1e12) / 3600 : measured;
    const rate = speed > 0 ? speed * 1e12 : measured === null ? null : group.comp / (3600 * measured);
    const cells = [
      withUnit(group.comp), hours === null ? "not measured" : hoursText(hours), rate === null ? "" : withUnit(rate),
      hours === null || !(price >= 0) ? "" : (hours * price).toPrecision(3),
    ];
    const row = element("tr", {}, element("th", { className: "text run", scope: "row", textContent: group.label }),
      ...cells.map((textContent) => element("td", { textContent })));
    row.dataset.run = String(index);
    row.dataset.hours = hours === null ? "" : String(hours);
    return row;
  });
  const caption = element("caption", {
    className: "small", textContent: "For one seed: the run on top, the chosen run, and the alternatives. " +
      (speed > 0 ? "The time is computed from the FLOPs and the given speed." : "The time is the training time in the ledger."),
  });
  byId("costs").replaceChildren(caption, element("thead", {}, head), element("tbody", {}, ...rows));
  const machines = [...new Set(indices.map((index) => comparison.groups[index].machine).filter((text) => text))];
  byId("costs-note").textContent = speed > 0 ? "" : `Measured on: ${machines.join("; ") || "unknown machine"}. Training ` +
    "only: without start, validation and evaluation. Where several runs shared a machine, the time is longer than alone.";
};

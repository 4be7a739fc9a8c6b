// Show what training costs, in time and in money.

// Show the measured training time of groups, and the price at the given price of an hour: for one seed, and for all seeds
// of the run. With a given speed of a machine, the time is computed from the FLOPs.
const showCosts = (indices) => {
  const price = Number.parseFloat(state.price), speed = Number.parseFloat(state.speed);
  const names = [["run", "text"], ["training FLOPs, one seed"], ["time, one seed"], ["time, all seeds"],
    ["FLOPs per second", "minor"], ...(price >= 0 ? [["price, one seed"], ["price, all seeds"]] : [])];
  const head = element("tr", {}, ...names.map(([textContent, className = ""]) =>
    element("th", { textContent, scope: "col", className })));
  const groups = indices.map((index) => comparison.groups[index]);
  const rows = groups.map((group, i) => {
    const measured = hoursOf(group), numSeeds = group.seeds.length;
    const hours = speed > 0 ? group.comp / (speed * 1e12) / 3600 : measured;
    const rate = speed > 0 ? speed * 1e12 : measured === null ? null : group.comp / (3600 * measured);
    const timeOf = (number) => (hours === null ? "not measured" : hoursText(number * hours));
    const priceOf = (number) => (hours === null ? "" : (number * hours * price).toPrecision(3));
    const cells = [
      [withUnit(group.comp)], [timeOf(1)], [`${timeOf(numSeeds)} (${plural(numSeeds, "seed")})`],
      [rate === null ? "" : withUnit(rate), "minor"], ...(price >= 0 ? [[priceOf(1)], [priceOf(numSeeds)]] : []),
    ];
    const row = element("tr", {}, element("th", { className: "text run", scope: "row", textContent: group.label }),
      ...cells.map(([textContent, className = ""]) => element("td", { textContent, className })));
    row.dataset.run = String(indices[i]);
    row.dataset.hours = hours === null ? "" : String(hours);
    return row;
  });
  const together = groups.filter((group) => group.trained_together).length;
  const caption = element("caption", {
    className: "small", textContent: "The run on top, the chosen run, and the alternatives. " + (speed > 0
      ? "The time is computed from the FLOPs and the given speed." : timeMeaning(together, groups.length)),
  });
  byId("costs").replaceChildren(caption, element("thead", {}, head), element("tbody", {}, ...rows));
  byId("costs-note").textContent = speed > 0 || !groups.length ? "" : `${machinesOf(groups)} Only training is counted, not ` +
    "start, validation and evaluation. Where several runs shared a machine, the time is longer than alone.";
};

// Say what the time of one seed covers. `together` is the number of groups whose seeds were trained together.
const timeMeaning = (together, number) => {
  if (together === 0) return "The time of one seed is the training time in its ledger.";
  return `${together === number ? "The seeds of each run were" : "In some of these runs, the seeds were"} trained together, in ` +
    "one process. The ledger divides the time of this process by the number of seeds. So the time of one seed is its share; " +
    "trained alone, one seed can take longer than its share.";
};

// Say on which machines the times were measured.
const machinesOf = (groups) => {
  const known = [...new Set(groups.map((group) => group.machine).filter((text) => text))];
  const unknown = groups.filter((group) => !group.machine).length;
  if (!known.length) return "The folders of these runs do not record the machine on which the time was measured.";
  const others = unknown ? ` The folders of ${plural(unknown, "run")} do not record the machine.` : "";
  return `Measured on: ${known.join("; ")}.${others}`;
};

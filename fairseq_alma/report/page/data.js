// This file defines the data and the state of the page, and functions that format values as text.
// The page is computed from `data`, which alma-report wrote, and `state`, which the page stores in its URL.
// In `data`, a group consists of runs with equal settings, one per seed. The visible text of the page calls it a run.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);

// The page opens on the comparison with the most runs.
const largest = data.comparisons.reduce((a, b) => (b.groups.length > a.groups.length ? b : a));

const state = {
  c: largest.name,       // name of the comparison
  objective: "all",      // what "best" means: a key of comparison.objectives
  only: {},              // setting -> values; groups with other values are hidden
  x: "comp", y: "value", // axes of the plot of quality against cost: keys of AXES and QUALITIES
  sort: "",              // column that sorts the table; "": by the score
  down: false,           // true: in descending order
  chosen: "",            // `keyOf` the group shown in detail; "": the best one
};
let comparison;          // the open one of data.comparisons
let visible = [];        // indices of the groups that the filters do not hide, best first
let best, chosen;        // indices of the best group of them, or undefined, and of the group shown in detail
const keyOf = ({ folder, label }) => `${folder}: ${label}`;

// Create an HTML element. Strings among the children are inserted as text, never as HTML.
const element = (tag, properties = {}, ...children) => {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
};
const small = (...content) => element("p", { className: "small" }, ...content);

// Make an element show the explanation of a term, such as "wait" or "seeds", when the mouse is over it.
const explain = (target, term, text = undefined) => {
  const key = term.toLowerCase().replace(/[^a-z0-9]+/g, "");
  const meaning = text ?? data.terms[key] ?? data.terms[key.replace(/s$/, "")];
  if (meaning === undefined) return target;
  target.title = meaning;
  target.classList.add("term");
  return target;
};

// ---- numbers as text
const UNITS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const withUnit = (value) => {
  if (value === null) return "";
  const [size, unit] = UNITS.find(([one]) => Math.abs(value) >= one) ?? [1, ""];
  return `${+(value / size).toPrecision(3)} ${unit}`;
};
// Return an estimate, [mean, standard error], as text, such as "12.34 ± 0.56". Both may be null.
const withError = ([mean, error], scale = 1) => {
  if (mean === null) return "";
  return (scale * mean).toFixed(2) + (error === null ? "" : ` ± ${(scale * error).toFixed(2)}`);
};
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

// ---- values of a group
// Error rates are fractions in `data` and percent on the page.
const inPercent = (name) => name + (comparison.vision ? ", %" : "");
const shown = (estimate) => (estimate[0] === null ? "-"
  : withError(estimate, comparison.scale) + (comparison.vision ? " %" : ""));
const objective = () => comparison.objectives[state.objective];
// The value of a group under the chosen objective, on test data, and its score, on validation data, which decides.
const valueOf = (group) => group.value[state.objective];
const scoreOf = (group) => group.score[state.objective];
// Values that the axes of the plot of quality against cost can show.
const AXES = {
  comp: { of: (group) => [group.comp], name: () => "training FLOPs" },
  params: { of: (group) => [group.params], name: () => "parameters at the end" },
  mem: { of: (group) => [group.mem], name: () => "Mem (sum of parameters)" },
  forward: { of: (group) => [group.forward_flops], name: () => "FLOPs of one prediction" },
  wait: { of: (group) => [group.wait], name: () => "wait, in mega-batches" },
  wall: { of: (group) => [group.wall_seconds], name: () => "wall time, s" },
};
const scaled = (estimate) => estimate.map((value) => (value === null ? null : value * comparison.scale));
const QUALITIES = {
  value: { of: (group) => scaled(valueOf(group)), name: () => `${inPercent(objective().name)} (test)` },
  score: { of: (group) => scaled(scoreOf(group)), name: () => `${inPercent(objective().score)} (validation)` },
  quality: { of: (group) => group.quality, name: () => `${comparison.quality}, as in the paper (test)` },
};

// This file defines the data and the state of the page, and functions that format values as text.
// The page is computed from `data`, which alma-report wrote, and `state`, which the page stores in its URL.
// In `data`, a group consists of runs with equal settings, one per seed. The visible text of the page calls it a run.

const byId = (id) => document.getElementById(id);
// alma-report writes this string for infinity, which JSON cannot represent.
const INFINITE = "\0infinite";
const data = JSON.parse(byId("data").textContent, (_, value) => (value === INFINITE ? Infinity : value));

// Maximum number of curves in a plot: at first, and after the user asked for more.
const MAX_CURVES = 8, MORE_CURVES = 30;
// If there are at most this many points, the plots have error bars and are redrawn while a slider is moved.
const FEW_POINTS = 200;
// If a stream has at most this many arrivals, its curves have markers at each arrival.
const FEW_ARRIVALS = 12;
const OBJECTIVES = ["all", "after", "final"];

// The comparison with the most runs: the page opens on it.
const largestComparison = () => data.comparisons.reduce((largest, { groups }, number) =>
  (groups.length > data.comparisons[largest].groups.length ? number : largest), 0);

const state = {
  c: largestComparison(),                      // index of the comparison; the URL contains the name instead
  objective: data.default_objective,           // what "best" means: one of OBJECTIVES
  only: {},                                    // setting -> values; groups with other values are hidden
  comp: null, params: null, target: null,      // limits of the budget; null: no limit
  x: "comp", y: "value",                       // axes of the trade-off plot: keys of AXES and QUALITIES
  sort: "score", down: false,                  // column that sorts the table; true: in descending order
  more: false,                                 // true: plots may have MORE_CURVES curves
  price: "", speed: "",                        // texts of the inputs: price of an hour, TFLOP per second of a machine
  chosen: null,                                // index of the group shown in detail; the URL contains its folder
  first: null, second: null,                   // indices of the two compared groups, likewise; first null: the best one
};
let comparison;                                // data.comparisons[state.c]
let visible = [];                              // indices of the groups that the filters do not hide

// Create an HTML element. Strings among the children are inserted as text, never as HTML.
const element = (tag, properties = {}, ...children) => {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
};
const small = (...content) => element("p", { className: "small" }, ...content);

// ---- numbers as text
const UNITS = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const withUnit = (value) => {
  if (value === null || value === undefined) return "";
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)} ${unit}`;
  }
  return `${+value.toPrecision(3)}`;
};
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : "inf");
const signed = (value, text) => (value > 0 ? "+" : "") + text;
// Return an estimate as text, such as "12.34 ± 0.56". `estimate` is [mean, standard error or null], or null.
const withError = (estimate, scale = 1, digits = 2) => {
  if (estimate === null) return "";
  const [mean, error] = estimate;
  return fixed(scale * mean, digits) + (error === null ? "" : ` ± ${fixed(scale * error, digits)}`);
};
const hoursText = (hours) => {
  if (hours >= 1) return `${+hours.toPrecision(3)} h`;
  return hours >= 1 / 60 ? `${+(60 * hours).toPrecision(3)} min` : `${+(3600 * hours).toPrecision(3)} s`;
};

// ---- values of a group
// Error rates are fractions in `data` and percent on the page.
const scale = () => comparison.scale;
const unit = () => (comparison.vision ? " %" : "");
const plural = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
// Wall time of a run as text. If its seeds were trained together, this is the time of all of them.
const wallOf = (group) => (group.trained_together ? `${group.wall_text} for all ${plural(group.seeds.length, "seed")} together`
  : `${group.wall_text}${group.seeds.length > 1 ? " per seed" : ""}`);
const inPercent = (name) => name + (comparison.vision ? ", %" : "");
const objective = () => comparison.objectives[state.objective];
// The value of a group under the chosen objective, on test data: [mean, standard error], or null.
const valueOf = (group) => group.value[state.objective];
// The score of a group under the chosen objective, on validation data, or null. The lowest score is the best.
const scoreOf = (group) => group.score[state.objective];
const scaled = (value) => (value === null || value === undefined ? null : value * scale());
const meanOf = (estimate) => estimate && estimate[0];
const errorOf = (estimate) => estimate && estimate[1];
// The paper's measure: the sum of the error rates, or the arithmetic mean of the perplexities.
const paperName = () => (comparison.vision ? `CER${comparison.cer_from === 0 ? " from t = 0" : ""}` : "average perplexity");
const paperTerm = () => (comparison.vision ? "CER" : "average perplexity");
// Training time of one seed, in hours; null if it was not measured.
const hoursOf = (group) => (group.train_seconds > 0 ? group.train_seconds / 3600 : null);

// Values that the x axis of the trade-off plot can show.
const AXES = {
  comp: { of: (group) => group.comp, name: () => "training FLOPs" },
  params: { of: (group) => group.params, name: () => "parameters at the end" },
  mem: { of: (group) => group.mem, name: () => "Mem (sum of parameters)" },
  forward: { of: (group) => group.forward_flops, name: () => "FLOPs of one prediction" },
  wall: { of: (group) => group.wall_seconds, name: () => "wall time, s" },
  hours: { of: hoursOf, name: () => "training time, h" },
};
// Values that the y axes of the plots can show.
const QUALITIES = {
  value: {
    of: (group) => scaled(meanOf(valueOf(group))),
    error: (group) => scaled(errorOf(valueOf(group))),
    name: () => `${inPercent(objective().name)} (test)`,
  },
  score: { of: (group) => scaled(scoreOf(group)), error: () => null, name: () => inPercent(objective().score) },
  quality: {
    of: (group) => meanOf(group.quality),
    error: (group) => errorOf(group.quality),
    name: () => (comparison.vision ? "CER (test)" : "average perplexity: arithmetic mean, as in the paper (test)"),
  },
};
// The limits of the budget. Each limit has a slider and a field for a number. `scale` is the factor from a value to the
// number that the page shows.
const LIMITS = {
  comp: {
    of: (group) => group.comp, text: (value) => `${withUnit(value)}FLOP`, smallest: () => "the least training is",
    scale: () => 1, example: () => "100G",
  },
  params: {
    of: (group) => group.params, text: withUnit, smallest: () => "the fewest parameters are",
    scale: () => 1, example: () => "50k",
  },
  target: {
    of: scoreOf,
    smallest: () => `the lowest ${objective().score} is`,
    text: (value) => fixed(scaled(value), 2) + unit(),
    scale, example: () => (comparison.vision ? "6 %" : "60"),
  },
};

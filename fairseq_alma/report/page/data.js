// This file defines the data and the state of the page, and functions that format values as text.
// The page is computed from `data`, which alma-report wrote, and `state`, which the page stores in its URL.
// In `data`, a group consists of runs with equal settings, one per seed. The visible text of the page calls it a run.

const byId = (id) => document.getElementById(id);
// alma-report writes this string for infinity, which JSON cannot represent.
const INFINITE = "\0infinite";
const data = JSON.parse(byId("data").textContent, (_, value) => (value === INFINITE ? Infinity : value));

// Maximum number of curves in the plot over the stream.
const MAX_CURVES = 30;
// If there are at most this many points, the plots have error bars and are redrawn while a slider is moved.
const FEW_POINTS = 200;
// If a stream has at most this many arrivals, its curves have markers.
const FEW_ARRIVALS = 12;

const state = {
  c: 0,                                        // index of the comparison; the URL contains the name instead
  off: {},                                     // setting -> values; groups with these values are hidden
  comp: null, params: null, final: null,       // limits of the budget; null: no limit
  x: "comp", y: "quality",                     // axes of the trade-off plot: keys of AXES and QUALITIES
  sort: "score", down: false,                  // column that sorts the table; true: in descending order
  chosen: null,                                // index of the group shown in detail; the URL contains its folder
};
let comparison;                                // data.comparisons[state.c]
let visible = [];                              // indices of the groups that the filters do not hide

// Create an HTML element. Strings among the children are inserted as text, never as HTML.
const element = (tag, properties = {}, ...children) => {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...children);
  return created;
};
const small = (text) => element("p", { className: "small", textContent: text });

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

// ---- values of a group
const percent = () => (comparison.vision ? 100 : 1);
const qualityName = () => (comparison.vision ? "CER" : "average perplexity");
const finalName = () => (comparison.vision ? "final error" : "final perplexity");
// The score by which the best group is chosen. Prequential errors are shown in percent.
const scoreUnit = () => (comparison.rule.scale === 100 ? " %" : "");
const scoreName = () => comparison.rule.name + (comparison.rule.scale === 100 ? ", %" : "");
const scoreOf = (group) => group.score === null ? null : group.score * comparison.rule.scale;
const meanOf = (estimate) => estimate && estimate[0];
const errorOf = (estimate) => estimate && estimate[1];

// Values that the x axis of the trade-off plot can show.
const AXES = {
  comp: { of: (group) => group.comp, name: () => "training FLOPs" },
  params: { of: (group) => group.params, name: () => "parameters at the end" },
  mem: { of: (group) => group.mem, name: () => "Mem (sum of parameters)" },
  forward: { of: (group) => group.forward_flops, name: () => "FLOPs of one prediction" },
  wall: { of: (group) => group.wall_seconds, name: () => "wall time, s" },
};
// Values that the y axis of the trade-off plot can show. A value is not available if it has a function `only` and this
// function returns false.
const QUALITIES = {
  quality: {
    of: (group) => meanOf(group.quality),
    error: (group) => errorOf(group.quality),
    name: () => `${qualityName()}, test`,
  },
  after: {
    of: (group) => meanOf(group.after_first_stage),
    error: (group) => errorOf(group.after_first_stage),
    name: () => "average perplexity after the first stage, test",
    only: () => !comparison.vision,
  },
  final: {
    of: (group) => group.final && group.final[0] * percent(),
    error: (group) => (group.final && group.final[1] !== null ? group.final[1] * percent() : null),
    name: () => `${finalName()}, test${comparison.vision ? ", %" : ""}`,
  },
  score: { of: scoreOf, error: () => null, name: scoreName },
};
// The limits of the budget. Each limit has a slider.
const LIMITS = {
  comp: { of: (group) => group.comp, text: (value) => `${withUnit(value)}FLOP`, smallest: () => "the least training is" },
  params: { of: (group) => group.params, text: withUnit, smallest: () => "the fewest parameters are" },
  final: {
    of: (group) => meanOf(group.final_validation),
    smallest: () => `the lowest ${finalName()} on validation data is`,
    text: (value) => (comparison.vision ? `${fixed(100 * value, 2)} %` : fixed(value, 2)),
  },
};

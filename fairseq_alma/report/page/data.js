// The data of the page, and how values are read and written.
// Everything that is shown follows from `data`, which alma-report wrote, and `state`, which the page's address keeps.
// In `data`, a group is the runs of one setting, one per seed. Readers of the page know it as a run.

const byId = (id) => document.getElementById(id);
// JSON has no infinity: the report writes this string in its place.
const INFINITE = "\0infinite";
const data = JSON.parse(byId("data").textContent, (_, value) => (value === INFINITE ? Infinity : value));

const MAX_CURVES = 30;
// With at most this number of points, the plots have error bars, and follow a slider at once.
const FEW_POINTS = 200;
const FEW_ARRIVALS = 12;

const state = {
  c: 0,                                        // index of the comparison; its name in the address
  off: {},                                     // setting -> values whose groups are hidden
  comp: null, params: null, final: null,       // limits of the budget; null: no limit
  x: "comp", y: "quality",                     // axes of the trade-off
  sort: "score", down: false,                  // column by which the table is sorted, and whether in descending order
  chosen: null,                                // index of the group whose details are shown; its folder in the address
};
let comparison;                                // data.comparisons[state.c]
let visible = [];                              // indices of the groups that the filters leave

// Create an HTML element. Children that are strings become text, never markup.
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
// estimate: [mean, standard error or null], or null
const withError = (estimate, scale = 1, digits = 2) => {
  if (estimate === null) return "";
  const [mean, error] = estimate;
  return fixed(scale * mean, digits) + (error === null ? "" : ` ± ${fixed(scale * error, digits)}`);
};

// ---- values of a group
const percent = () => (comparison.vision ? 100 : 1);
const qualityName = () => (comparison.vision ? "CER" : "average perplexity");
const finalName = () => (comparison.vision ? "final error" : "final perplexity");
const meanOf = (estimate) => estimate && estimate[0];
const errorOf = (estimate) => estimate && estimate[1];

// The x axes of the trade-off.
const AXES = {
  comp: { of: (group) => group.comp, name: () => "training FLOPs" },
  params: { of: (group) => group.params, name: () => "parameters at the end" },
  mem: { of: (group) => group.mem, name: () => "Mem (sum of parameters)" },
  forward: { of: (group) => group.forward_flops, name: () => "FLOPs of one prediction" },
  wall: { of: (group) => group.wall_seconds, name: () => "wall time, s" },
};
// The y axes of the trade-off. `only` says for which comparisons one exists.
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
  score: { of: (group) => group.score, error: () => null, name: () => `${qualityName()}, validation` },
};
// The limits of the budget, one slider each.
const LIMITS = {
  comp: { of: (group) => group.comp, text: (value) => `${withUnit(value)}FLOP` },
  params: { of: (group) => group.params, text: withUnit },
  final: {
    of: (group) => meanOf(group.final_validation),
    text: (value) => (comparison.vision ? `${fixed(100 * value, 2)} %` : fixed(value, 2)),
  },
};

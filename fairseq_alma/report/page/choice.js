// Choose the best group within the budget, and compute its rivals and the Pareto front.
// choice.py has the same functions in Python, and a test compares the results.

// Return the indices of the visible groups that can be chosen: they are finished and have a validation score.
const candidates = () =>
  visible.filter((index) => comparison.groups[index].finished && scoreOf(comparison.groups[index]) !== null);

// Return true if a group does not exceed any limit of the budget.
const isWithinBudget = (group) => Object.keys(LIMITS).every((name) => {
  if (state[name] === null) return true;
  const value = LIMITS[name].of(group);
  return value !== null && value !== undefined && value <= state[name];
});

// Return true if list a is smaller than list b at the first index where the lists differ.
const isLess = (a, b) => {
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
};

// Return the index of the best group within the budget, or null if there is no such group. Without a target, this is the
// group with the lowest validation score. Among groups with equal scores, choose the one with the fewest training FLOPs.
// If the FLOPs are equal too, choose the one with the fewest parameters, and then the first one.
// With a target, choose the group that reaches it with the fewest training FLOPs.
const bestWithinBudget = () => {
  let best = null;
  for (const index of candidates()) {
    const group = comparison.groups[index];
    if (!isWithinBudget(group)) continue;
    const score = scoreOf(group), cost = [group.comp, group.params];
    const key = state.target === null ? [score, ...cost, index] : [group.comp, score, group.params, index];
    if (best === null || isLess(key, best)) best = key;
  }
  return best === null ? null : best[3];
};

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// Return how much larger (worse) the results of the second group are than those of the first: the mean difference, half
// of its 95% interval, and a verdict. It is paired over the seeds that both groups have. If they share none, the means
// are one pair. Return null if a group has no results. `kind` is "test" or "validation". `pairs` is the number of seeds.
const difference = (first, second, kind, objective = state.objective) =>
  pairedDifference(first, second, (group) => group[kind][objective]);

// The same for other results. `valuesOf` returns the results of a group, one for each seed.
const pairedDifference = (first, second, valuesOf) => {
  const [a, b] = [first, second].map(valuesOf);
  if (!a.length || !b.length) return null;
  const infinite = [a, b].map((values) => values.some((value) => !Number.isFinite(value)));
  if (infinite[0] && infinite[1]) return null;
  if (infinite[0]) return { mean: -Infinity, margin: null, pairs: 1, verdict: "better" };
  if (infinite[1]) return { mean: Infinity, margin: null, pairs: 1, verdict: "worse" };
  const gaps = [];
  first.seeds.forEach((seed, i) => {
    const j = seed === null ? -1 : second.seeds.indexOf(seed);
    if (j >= 0) gaps.push(b[j] - a[i]);
  });
  if (!gaps.length) return { mean: mean(b) - mean(a), margin: null, pairs: 0, verdict: "one seed" };
  const gap = mean(gaps);
  if (gaps.length === 1) return { mean: gap, margin: null, pairs: 1, verdict: "one seed" };
  const quantile = data.constants.t95[gaps.length - 2] ?? 2.0;
  const variance = gaps.reduce((sum, value) => sum + (value - gap) ** 2, 0) / (gaps.length - 1);
  const margin = quantile * Math.sqrt(variance / gaps.length);
  const verdict = Math.abs(gap) > margin ? (gap > 0 ? "worse" : "better") : "no clear difference";
  return { mean: gap, margin, pairs: gaps.length, verdict };
};

// Return the groups within the budget that the validation data cannot tell from the best one: [{ index, reason }], lowest
// score first. The reason is "noise" or "bias". Empty if the budget has a target. A group with the same results as the
// best one is left out, and so is one with the same results as an earlier rival.
const rivalsOf = (best) => {
  if (best === null || state.target !== null) return [];
  const { biased, noise } = objective(), group = comparison.groups[best], lowest = scoreOf(group);
  const reasonOf = (index) => {
    const other = comparison.groups[index], score = scoreOf(other);
    if (index === best || !Number.isFinite(score) || !isWithinBudget(other)) return null;
    const isBiased = biased && other.wait > group.wait && score * (1 - data.constants.bias) <= lowest;
    const gap = difference(group, other, "validation");
    const isNoise = gap !== null && (gap.margin !== null ? !(gap.mean > gap.margin)
      : noise !== null && gap.mean <= 2 * Math.SQRT2 * noise * lowest);
    return isNoise ? "noise" : isBiased ? "bias" : null;
  };
  const found = candidates().map((index) => ({ index, reason: reasonOf(index) })).filter(({ reason }) => reason !== null)
    .sort((a, b) => scoreOf(comparison.groups[a.index]) - scoreOf(comparison.groups[b.index]) || a.index - b.index);
  const seen = new Set([group.twin]);
  return found.filter(({ index }) => {
    const { twin } = comparison.groups[index];
    return !seen.has(twin) && seen.add(twin);
  });
};

// Return the steps of a slider: the values from small to large. A step stands for all values from its smallest one up to
// 2% above this, and is the largest of them.
const sliderSteps = (values) => {
  const steps = [];
  let smallest = null;
  for (const value of [...new Set(values)].sort((a, b) => a - b)) {
    if (smallest !== null && value <= smallest * data.constants.same_step) {
      steps[steps.length - 1] = value;
    } else {
      steps.push(value);
      smallest = value;
    }
  }
  return steps;
};

// For a budget that no group keeps: for each of its limits, the smallest value among the groups that keep the others.
const closestToBudget = () => Object.keys(LIMITS).filter((name) => state[name] !== null).map((name) => {
  const limit = state[name];
  state[name] = null;
  const values = candidates().map((index) => comparison.groups[index]).filter(isWithinBudget).map(LIMITS[name].of);
  state[name] = limit;
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? `${LIMITS[name].smallest()} ${LIMITS[name].text(Math.min(...known))}` : null;
}).filter((text) => text !== null);

// Return the indices of the groups on the Pareto front of the trade-off plot, from left to right. A group is on the
// front if no other group beats it, that is, if none is at least as good on both axes and better on one.
const paretoFront = () => {
  const x = AXES[state.x].of, y = QUALITIES[state.y].of;
  const points = visible.filter((index) => comparison.groups[index].finished)
    .map((index) => [x(comparison.groups[index]), y(comparison.groups[index]), index])
    .filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b));
  points.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const front = [];
  let lowestY = Infinity, lastX = null;
  for (const [pointX, pointY, index] of points) {
    // Equal points do not beat each other, so all of them are on the front.
    if (pointY < lowestY || (pointY === lowestY && pointX === lastX)) {
      front.push(index);
      lowestY = pointY;
      lastX = pointX;
    }
  }
  return front;
};

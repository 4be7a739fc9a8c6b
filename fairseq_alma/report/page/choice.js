// Choose the best group within the budget, and compute the Pareto front.
// choice.py has the same functions in Python, and a test compares the results.

// Return the indices of the visible groups that can be chosen: they are finished and have a validation score.
const candidates = () =>
  visible.filter((index) => comparison.groups[index].finished && comparison.groups[index].score !== null);

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

// Return the index of the best group within the budget, or null if there is no such group. Without a limit of the final
// error, this is the group with the lowest validation score. Among groups with equal scores, choose the one with the
// fewest training FLOPs. If the FLOPs are equal too, choose the one with the fewest parameters, and then the first one.
// A limit of the final error is a target: choose the group that reaches it with the fewest training FLOPs.
const bestWithinBudget = () => {
  let best = null;
  for (const index of candidates()) {
    const group = comparison.groups[index];
    if (!isWithinBudget(group)) continue;
    const cost = [group.comp, group.params];
    const key = state.final === null ? [group.score, ...cost, index] : [...cost, group.score, index];
    if (best === null || isLess(key, best)) best = key;
  }
  return best === null ? null : best[3];
};

// Return the steps of a slider: the values from small to large. A step stands for all values from its smallest one up to
// 2% above this, and is the largest of them.
const SAME_STEP = 1.02;
const sliderSteps = (values) => {
  const steps = [];
  let smallest = null;
  for (const value of [...new Set(values)].sort((a, b) => a - b)) {
    if (smallest !== null && value <= smallest * SAME_STEP) {
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

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

// Return the index of the group with the lowest validation score within the budget, or null if there is no such group.
// Among groups with equal scores, choose the one with the fewest training FLOPs. If the FLOPs are equal too, choose
// the one with the fewest parameters, and then the first one.
const bestWithinBudget = () => {
  let best = null;
  for (const index of candidates()) {
    const group = comparison.groups[index];
    if (!isWithinBudget(group)) continue;
    const key = [group.score, group.comp, group.params, index];
    if (best === null || isLess(key, best)) best = key;
  }
  return best === null ? null : best[3];
};

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

// Which group to choose. choice.py has the same functions, and a test compares their results.

const candidates = () =>
  visible.filter((index) => comparison.groups[index].finished && comparison.groups[index].score !== null);

// Return whether a group keeps all limits of the budget.
const isWithinBudget = (group) => Object.keys(LIMITS).every((name) => {
  if (state[name] === null) return true;
  const value = LIMITS[name].of(group);
  return value !== null && value !== undefined && value <= state[name];
});

// Return whether list a comes before list b, by the first entry that differs.
const isLess = (a, b) => {
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
};

// Return the index of the lowest validation score within the budget, or null.
// Ties go to fewer training FLOPs, then to fewer parameters, then to the first.
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

// Return the indices of the groups that no other group beats on both axes of the trade-off, from left to right.
const paretoFront = () => {
  const x = AXES[state.x].of, y = QUALITIES[state.y].of;
  const points = visible.filter((index) => comparison.groups[index].finished)
    .map((index) => [x(comparison.groups[index]), y(comparison.groups[index]), index])
    .filter(([a, b]) => Number.isFinite(a) && Number.isFinite(b));
  points.sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]);
  const front = [];
  let lowestY = Infinity, lastX = null;
  for (const [pointX, pointY, index] of points) {
    // Equal points do not beat each other: both are on the front.
    if (pointY < lowestY || (pointY === lowestY && pointX === lastX)) {
      front.push(index);
      lowestY = pointY;
      lastX = pointX;
    }
  }
  return front;
};

// The limits of the budget: a slider and a field for a number for each limit.

const stepsOf = (name) => {
  const values = comparison.groups.filter((group) => group.finished).map(LIMITS[name].of);
  return sliderSteps(values.filter((value) => value !== null && value !== undefined));
};

const PREFIXES = { k: 1e3, m: 1e6, g: 1e9, t: 1e12, p: 1e15, e: 1e18 };
const THOUSANDS = /^\d{1,3}(,\d{3})+(?!\d)/;
const NUMBER = /^(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?\s*([kmgtpe]?)\s*(?:flops?|%)?$/i;

// Return a number that a user typed, such as "12.6T", "100 GFLOP" or "6 %", and how many of its digits count; or null if
// it is not a number.
const parsedNumber = (text) => {
  const found = NUMBER.exec(text.trim().replace(THOUSANDS, (digits) => digits.replaceAll(",", "")));
  if (found === null) return null;
  const [, digits, exponent, prefix] = found;
  const value = Number(`${digits}e${exponent ?? 0}`) * (PREFIXES[prefix.toLowerCase()] ?? 1);
  const significant = digits.replace(".", "").replace(/^0+/, "").length;
  return Number.isFinite(value) ? { value, significant } : null;
};

// Return the limit that a typed number means. The page shows three significant digits, and scores with two decimals. So a
// typed limit allows a value that is larger, but reads the same on the page: "12.6T" allows 12.61 T, and "12.60T" does not.
const typedLimit = (name, { value, significant }) => {
  const factor = LIMITS[name].scale();
  const asShown = (one) => (name === "target" ? (factor * one).toFixed(2) : one.toPrecision(Math.max(3, significant)));
  const allowed = comparison.groups.filter((group) => group.finished).map(LIMITS[name].of)
    .filter((one) => Number.isFinite(one) && Number(asShown(one)) <= value);
  return Math.max(value / factor, ...allowed);
};

const buildSliders = () => {
  byId("target-label").textContent = `Target: ${objective().score}, at most`;
  for (const name of Object.keys(LIMITS)) buildLimit(name);
};

const buildLimit = (name) => {
  const steps = stepsOf(name), input = byId(name), output = byId(`${name}-value`), typed = byId(`${name}-typed`);
  // The slider has one step for each value of a finished group; values within 2% are one step. The last step means
  // no limit.
  input.max = String(steps.length);
  const stepAt = (limit) => (limit === null ? -1 : steps.findIndex((value) => value >= limit));
  if (stepAt(state[name]) < 0) state[name] = null;
  const showLimit = () => {
    output.textContent = state[name] === null ? "no limit" : LIMITS[name].text(state[name]);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  const showError = (text) => {
    byId(`${name}-error`).textContent = text;
    if (text) typed.setAttribute("aria-invalid", "true");
    else typed.removeAttribute("aria-invalid");
  };
  const moveSlider = () => {
    const step = stepAt(state[name]);
    input.value = String(step < 0 ? steps.length : step);
  };
  input.oninput = () => {
    state[name] = steps[Number(input.value)] ?? null;
    typed.value = "";
    showError("");
    showLimit();
    drawSoon();
  };
  if (state[name] === null) typed.value = "";
  typed.placeholder = `or type, e.g. ${LIMITS[name].example()}`;
  typed.oninput = () => {
    const number = typed.value.trim() === "" ? null : parsedNumber(typed.value);
    if (number === null && typed.value.trim() !== "") {
      showError(`"${typed.value}" is not a number. Type a number such as ${LIMITS[name].example()}, ` +
        "or leave the field empty for no limit.");
      return;
    }
    state[name] = number === null ? null : typedLimit(name, number);
    showError("");
    moveSlider();
    showLimit();
    drawSoon();
  };
  showError("");
  moveSlider();
  showLimit();
};

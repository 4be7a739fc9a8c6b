// Marks of curves: colour, dashes and symbols. Each plot with curves has a legend below it, as HTML.

// Shapes of markers, in a square from -5 to 5: names that Plotly knows, and SVG paths for the legends.
const SHAPES = {
  circle: "M5 0A5 5 0 1 1-5 0A5 5 0 1 1 5 0Z",
  square: "M-4-4H4V4H-4Z",
  diamond: "M0-5L5 0L0 5L-5 0Z",
  "triangle-up": "M0-5L5 4H-5Z",
  "triangle-down": "M0 5L5-4H-5Z",
  cross: "M-2-5H2V-2H5V2H2V5H-2V2H-5V-2H-2Z",
  x: "M-5-3L-3-5L0-2L3-5L5-3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
  "triangle-left": "M-5 0L4-5V5Z",
  "triangle-right": "M5 0L-4-5V5Z",
  star: "M0-5L1.5-1.7L5-1.5L2.3.8L3.2 4.6L0 2.5L-3.2 4.6L-2.3.8L-5-1.5L-1.5-1.7Z",
  hexagon: "M-5 0L-2.5-4.5H2.5L5 0L2.5 4.5H-2.5Z",
};
const DASHES = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "11 4", longdashdot: "11 3 2 3" };

// Return the symbol of each group, so that no two curves have the same colour, dashes and symbol: index -> symbol.
// The first curve of a colour has the symbol of its learner. Open symbols follow when all shapes are used.
const symbolsOf = (indices) => {
  const used = new Map(), symbols = new Map();
  for (const index of indices) {
    const { colour, symbol } = comparison.groups[index];
    const taken = used.get(colour) ?? used.set(colour, new Set()).get(colour);
    const names = [symbol, ...Object.keys(SHAPES)].flatMap((name) => [name, `${name}-open`, `${name}-open-dot`]);
    const order = [...names.filter((_, i) => i % 3 === 0), ...names.filter((_, i) => i % 3 === 1),
      ...names.filter((_, i) => i % 3 === 2)];
    const free = order.find((name) => !taken.has(name)) ?? symbol;
    taken.add(free);
    symbols.set(index, free);
  }
  return symbols;
};

const svg = (tag, attributes) => {
  const created = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) created.setAttribute(name, String(value));
  return created;
};

// Return a sample of a curve: its line and its symbol.
const sample = (colour, dash, symbol) => {
  const picture = svg("svg", { width: 38, height: 14, viewBox: "-19 -7 38 14", "aria-hidden": "true" });
  if (dash !== null) {
    const line = { x1: -19, x2: 19, stroke: colour, "stroke-width": 2, "stroke-dasharray": DASHES[dash] ?? "" };
    picture.append(svg("line", line));
  }
  if (symbol === null) return picture;
  const shape = symbol.replace(/-open(-dot)?$/, ""), isOpen = symbol !== shape;
  const path = { d: SHAPES[shape] ?? SHAPES.circle, stroke: colour, "stroke-width": 1.3, fill: isOpen ? "white" : colour };
  picture.append(svg("path", path));
  if (symbol.endsWith("-dot")) picture.append(svg("circle", { r: 1.3, fill: colour }));
  return picture;
};

// Show a legend. Each entry is { label, colour, dash (null: points), symbol, index (optional: a group) }.
const showLegend = (id, entries) => {
  byId(id).replaceChildren(...entries.map(({ label, colour, dash, symbol, index }) => {
    const picture = sample(colour, dash, symbol);
    if (index === undefined) return element("li", {}, picture, termed(label));
    return element("li", {}, picture, element("button", { type: "button", textContent: label, onclick: () => choose(index) }));
  }));
};

// Choose which runs the page shows.

// For each setting, runs with a pressed value are shown. If no value is pressed, all runs are shown, and "any" is pressed.
// ("all" would be unclear, because it is a value of replay.)
const toggleFilter = (name, value) => {
  const shown = state.only[name] ?? [];
  state.only[name] = shown.includes(value) ? shown.filter((other) => other !== value) : [...shown, value];
  buildFilters();
  applyFilters();
};

const filterChip = (textContent, isPressed, onclick) => {
  const chip = element("button", { className: "chip", type: "button", textContent, onclick });
  chip.setAttribute("aria-pressed", String(isPressed));
  return chip;
};

const buildFilters = () => {
  const isFocused = byId("filters").contains(document.activeElement);
  const had = JSON.stringify(document.activeElement?.dataset ?? {});
  const fieldsets = comparison.filters.map(({ name, values }) => {
    const shown = state.only[name] ?? [];
    const any = filterChip("any", shown.length === 0, () => {
      state.only[name] = [];
      buildFilters();
      applyFilters();
    });
    any.dataset.any = name;
    any.setAttribute("aria-label", `any ${name}`);
    const chips = values.map((text) => {
      const chip = filterChip(text, shown.includes(text), () => toggleFilter(name, text));
      if (name === "learner") explain(chip, text);
      Object.assign(chip.dataset, { filter: name, value: text });
      return chip;
    });
    return element("fieldset", {}, element("legend", {}, termed(name)), any, ...chips);
  });
  const showAll = element("button", {
    className: "chip", type: "button", textContent: "show all runs", id: "show-all",
    onclick: () => { state.only = {}; buildFilters(); applyFilters(); },
  });
  byId("filters").replaceChildren(...fieldsets, showAll);
  // The chips are new elements: give the focus back to the one that had it.
  const sameChip = (chip) => JSON.stringify(chip.dataset) === had;
  if (isFocused) [...document.querySelectorAll("#filters .chip")].find(sameChip)?.focus();
};

const isShown = (group) => comparison.filters.every(({ name }) => {
  const shown = state.only[name] ?? [];
  return shown.length === 0 || shown.includes(group.settings[name]);
});

const applyFilters = () => {
  visible = comparison.groups.map((_, index) => index).filter((index) => isShown(comparison.groups[index]));
  byId("count").textContent = `${visible.length} of ${comparison.groups.length} runs`;
  buildTable();
  draw();
};

// Explain terms: a term shows its entry of the glossary while the mouse is over it or it has the keyboard focus.

const keyOf = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "");

// Return the explanation of a term, such as "wait" or "seeds", or undefined.
const explanationOf = (text) => {
  const key = keyOf(text), singular = key.replace(/s$/, "");
  // In a comparison, a word can mean something else than in the glossary.
  return comparison?.terms[key] ?? data.terms[key] ?? comparison?.terms[singular] ?? data.terms[singular];
};

// Make an element show the explanation of a term. An element that cannot have the focus becomes focusable.
const explain = (target, term) => {
  if (explanationOf(term) === undefined) return target;
  target.dataset.term = term;
  target.classList.add("term");
  if (target.tabIndex < 0) target.tabIndex = 0;
  return target;
};

// Return an element with a term as text and its explanation.
const termed = (text, term = text) => explain(element("span", { textContent: text }), term);

// Return a text as parts, in which the first occurrence of some words explains a term.
const withTerm = (text, words, term) => {
  const at = text.indexOf(words);
  return at < 0 ? [text] : [text.slice(0, at), termed(words, term), text.slice(at + words.length)];
};

const showTip = (target) => {
  const tip = byId("tip"), text = explanationOf(target.dataset.term);
  if (text === undefined) return;
  tip.replaceChildren(element("strong", { textContent: `${target.dataset.term}: ` }), text);
  tip.hidden = false;
  target.setAttribute("aria-describedby", "tip");
  const box = target.getBoundingClientRect(), width = document.documentElement.clientWidth;
  tip.style.left = `${Math.max(8, Math.min(box.left, width - tip.offsetWidth - 8))}px`;
  const isAbove = box.bottom + tip.offsetHeight + 8 > innerHeight && box.top > tip.offsetHeight + 8;
  tip.style.top = `${isAbove ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
};

const hideTip = () => {
  byId("tip").hidden = true;
  document.querySelectorAll("[aria-describedby=tip]").forEach((one) => one.removeAttribute("aria-describedby"));
};

const startTips = () => {
  const ofEvent = (event) => event.target.closest?.("[data-term]");
  for (const name of ["mouseover", "focusin"]) {
    document.addEventListener(name, (event) => {
      const target = ofEvent(event);
      if (target) showTip(target);
      else if (name === "mouseover" && !byId("tip").hidden && !ofEvent({ target: document.activeElement })) hideTip();
    });
  }
  document.addEventListener("focusout", hideTip);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
  addEventListener("scroll", hideTip, { passive: true, capture: true });
  document.querySelectorAll("[data-explain]").forEach((one) => explain(one, one.dataset.explain));
};

// Small helpers for the page. Text is only ever set as text: no string becomes markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") && value !== null) made.setAttribute(name, String(value));
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A name from a program: isolated, so that a right-to-left one does not reorder what is beside it.
const isolated = (text) => element("bdi", {}, text);

// A colour of the sheet, which knows light and dark.
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function swatch(name) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--${name})`;
  return made;
}

// Buttons of which one is pressed; arrow keys go from one to the next.
function choice(label, options, chosen, choose) {
  const group = element("div", { class: "choice", role: "radiogroup", "aria-label": label });
  const show = (value) => {
    for (const button of group.children) {
      const on = button.dataset.value === value;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
    }
  };
  for (const [value, text] of options) {
    const pick = () => { show(value); choose(value); };
    group.append(element("button", { type: "button", role: "radio", "data-value": value, onclick: pick }, text));
  }
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...group.children];
    const next = buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length];
    next.focus();
    next.click();
  });
  show(chosen);
  group.show = show;
  return group;
}

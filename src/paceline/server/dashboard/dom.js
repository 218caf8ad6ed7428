// Elements from data. Text goes in as text, never as markup: names of models come from users.

const SVG = "http://www.w3.org/2000/svg";

export const at = (id) => document.getElementById(id);

export function html(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}

export function svg(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

// Set a text if it differs, so that a selection stays and a screen reader is told of changes only.
export function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// A browser's storage; where it is forbidden, what is stored is kept until the page is left.
export function storage(open) {
  try {
    return open();
  } catch {
    const kept = new Map();
    return {
      getItem: (name) => kept.get(name) ?? null,
      setItem: (name, value) => kept.set(name, value),
    };
  }
}

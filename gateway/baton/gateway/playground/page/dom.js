// Makes nodes. Text becomes text nodes, never markup.

/** One element; `properties` are set as properties, those of `attributes` as attributes. */
export function element(tag, { attributes = {}, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A small button that says what it does. */
export function actionButton(name, onclick, label = name) {
  const attributes = { "aria-label": label };
  return element("button", { type: "button", className: "action", textContent: name, onclick, attributes });
}

/** The element with this id; the page has it. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes a text area as high as its text, up to what its style allows. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

// Makes nodes. Text becomes text nodes, never markup.

/** Makes an element. Sets `properties` as properties and `attributes` as attributes. */
export function element(tag, { attributes = {}, ...properties } = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Makes a small button with a label. */
export function actionButton(name, onclick, label = name) {
  const attributes = { "aria-label": label };
  return element("button", { type: "button", className: "action", textContent: name, onclick, attributes });
}

/** Returns the element with this id, which must exist. */
export function byId(id) {
  return document.getElementById(id);
}

/** Makes a text area as high as its text, up to the maximum of its style. */
export function fitHeight(area) {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
}

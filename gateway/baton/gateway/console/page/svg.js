// Makes SVG nodes and sparklines.

const NAMESPACE = "http://www.w3.org/2000/svg";
const FEWEST = 15; // minimum number of values over the whole width
const WIDTH = 100;
const HEIGHT = 24;

/** Makes an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A sparkline of the last values on a scale from 0, with gaps for missing ones. */
export class Sparkline {
  constructor(capacity) {
    this.capacity = capacity;
    this.values = [];
    this.line = svg("path", { class: "spark-line" });
    this.area = svg("path", { class: "spark-area" });
    const attributes = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "spark" };
    this.node = svg("svg", { ...attributes, "aria-hidden": "true" }, this.area, this.line);
  }

  /** Adds the latest value; null if it is missing. */
  add(value) {
    this.values.push(value);
    if (this.values.length > this.capacity) this.values.shift();
    const top = Math.max(...this.values.map((one) => one ?? 0), 1e-9);
    const room = Math.max(FEWEST, this.values.length);
    const step = WIDTH / (room - 1);
    const first = room - this.values.length;
    const points = this.values.flatMap((one, at) =>
      one === null ? [] : [[(first + at) * step, HEIGHT - 1 - (one / top) * (HEIGHT - 2)]],
    );
    const path = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    this.line.setAttribute("d", points.length > 1 ? `M${path}` : "");
    const [left, right] = [points[0]?.[0], points.at(-1)?.[0]];
    this.area.setAttribute("d", points.length > 1 ? `M${left},${HEIGHT} L${path} L${right},${HEIGHT} Z` : "");
  }
}

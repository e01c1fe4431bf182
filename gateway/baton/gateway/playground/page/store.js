// Values stored until the tab closes. The API key is stored only here.

const PREFIX = "baton.";

/** Returns the value stored under a name, or the fallback if there is none or storage is disabled. */
export function recall(name, fallback) {
  try {
    const text = sessionStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Stores a value. Ignores values that do not fit. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    forget(name);
  }
}

/** Removes a value. */
export function forget(name) {
  try {
    sessionStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing was stored.
  }
}

// What a tab remembers until it closes. The API key is nowhere else.

const PREFIX = "baton.";

/** The value kept under a name, or the fallback where there is none or storage is switched off. */
export function recall(name, fallback) {
  try {
    const text = sessionStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

/** Keeps a value. One that does not fit is not kept, and the page works on. */
export function keep(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    forget(name);
  }
}

/** Forgets a value. */
export function forget(name) {
  try {
    sessionStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing was kept.
  }
}

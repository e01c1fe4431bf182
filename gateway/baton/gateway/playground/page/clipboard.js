// Copies text, also on pages over plain HTTP, where navigator.clipboard is missing.

/** Copies a text. Returns whether it worked. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** Copies a text and shows the result on the button for a moment. */
export async function copyFrom(button, text) {
  const name = button.dataset.name ?? (button.dataset.name = button.textContent);
  button.textContent = (await copyText(text)) ? "Copied" : "Copying failed";
  setTimeout(() => { button.textContent = name; }, 1500);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    area.remove();
    focused?.focus();
  }
}

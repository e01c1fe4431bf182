// Copies text, also where the page came over plain HTTP and navigator.clipboard is missing.

/** Whether the text is on the clipboard now. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

/** Copies, and says so on the button for a moment. */
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

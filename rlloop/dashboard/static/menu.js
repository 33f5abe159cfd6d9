// A button with a menu: arrow keys move in it, Escape and a click elsewhere close it.

import { h } from "./dom.js";

let open = null; // {menu, button}

export function closeMenu(focus = false) {
  if (!open) return;
  const { menu, button } = open;
  open = null;
  menu.remove();
  button.setAttribute("aria-expanded", "false");
  if (focus) button.focus();
}

// `items()`: {text, note, href, download, act} each; without `act` and `href`, a heading.
export function menuButton(text, label, items) {
  const button = h("button", { type: "button", class: "menu-button", "aria-haspopup": "menu", "aria-expanded": "false", "aria-label": label, title: label, onclick: (event) => {
    event.stopPropagation();
    const again = open?.button === button;
    closeMenu();
    if (!again) show(button, items());
  } }, text);
  return h("span", { class: "menu-host" }, button);
}

function show(button, items) {
  const menu = h("div", { class: "menu", role: "menu" }, items.map(({ text, note, href, download, act }) => {
    if (!href && !act) return h("div", { class: "menu-head", role: "presentation" }, text);
    const pick = () => { closeMenu(true); act?.(); };
    const content = [h("span", {}, text), note ? h("kbd", {}, note) : null];
    return href ? h("a", { role: "menuitem", tabindex: "-1", href, download: download ?? true, onclick: pick }, content) : h("button", { type: "button", role: "menuitem", tabindex: "-1", onclick: pick }, content);
  }));
  menu.addEventListener("keydown", (event) => {
    const all = [...menu.querySelectorAll("[role=menuitem]")], at = all.indexOf(document.activeElement);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined) all[(to + all.length) % all.length].focus();
    else if (event.key === "Escape" || event.key === "Tab") closeMenu(true);
    else if (event.key !== "Enter" && event.key !== " ") return event.stopPropagation();
    else return event.stopPropagation();
    event.preventDefault();
    event.stopPropagation();
  });
  open = { menu, button };
  button.setAttribute("aria-expanded", "true");
  button.parentElement.append(menu);
  const box = menu.getBoundingClientRect();
  if (box.left < 4) { menu.style.right = "auto"; menu.style.left = "0"; }
  if (box.bottom > innerHeight - 4 && box.top - box.height > 40) { menu.style.top = "auto"; menu.style.bottom = "100%"; }
  menu.querySelector("[role=menuitem]")?.focus({ preventScroll: true });
}

addEventListener("click", (event) => { if (open && !open.menu.contains(event.target)) closeMenu(); });

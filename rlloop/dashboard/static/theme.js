// Runs before the first paint, so that a dark page does not flash white.
const stored = localStorage.getItem("rlloop-theme");
const dark = stored ? stored === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";

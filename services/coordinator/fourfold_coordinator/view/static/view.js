// Follows a run in progress, shows values under the pointer, and switches the colors of tokens.
"use strict";
const PERIOD = 2000; // milliseconds between two looks at a run in progress
const received = new WeakMap(); // each part as the server sent it

function showTimes(root) {
  for (const time of root.querySelectorAll("time")) {
    const then = new Date(time.dateTime), seconds = Math.max((Date.now() - then) / 1000, 0);
    const [size, unit] = [[86400, "day"], [3600, "h"], [60, "min"], [1, "s"]].find(([least]) => seconds >= least) ?? [1, "s"];
    const count = Math.floor(seconds / size);
    const age = `${count} ${unit}${unit === "day" && count > 1 ? "s" : ""} ago`;
    const whole = `${then.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })} (${age})`;
    time.title = whole;
    time.textContent = "short" in time.dataset ? age : whole;
  }
}
for (const part of document.querySelectorAll("[data-part]")) received.set(part, part.innerHTML);
showTimes(document);

async function refresh() {
  try {
    if (!document.hidden) {
      const answer = await fetch(location.href, { headers: { "x-refresh": "1" } });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of document.querySelectorAll("[data-part]")) {
        const fresh = page.querySelector(`[data-part="${part.dataset.part}"]`);
        if (fresh && fresh.innerHTML !== received.get(part)) {
          received.set(part, fresh.innerHTML);
          part.replaceChildren(...fresh.childNodes);
        }
      }
      showTimes(document);
      const state = document.querySelector("header .state"), now = page.querySelector("header .state");
      if (state && now) { state.textContent = now.textContent; state.className = now.className; }
      if (answer.ok && !page.body.hasAttribute("data-live")) return; // the run has ended
    }
  } catch (error) { /* the server is gone: tried again */ }
  setTimeout(refresh, PERIOD);
}
if (document.body.hasAttribute("data-live")) setTimeout(refresh, PERIOD);

document.addEventListener("pointermove", (event) => {
  document.querySelectorAll(".tip").forEach((tip) => tip.remove());
  const chart = event.target.closest("svg[data-chart]");
  if (!chart) return;
  const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
  const x = (event.clientX - box.left) * scale;
  const lines = JSON.parse(chart.dataset.chart).map(({ name, points }) => {
    const near = points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
    return { name, x: near[2], value: near[3] };
  });
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.textContent = lines.map((line) => `${line.name}, step ${line.x}: ${line.value}`).join("\n");
  chart.parentElement.append(tip);
});

document.addEventListener("change", (event) => {
  if (event.target.name === "by") {
    const tokens = document.getElementById("tokens");
    tokens.classList.remove("by-logprob", "by-version", "by-advantage");
    tokens.classList.add(`by-${event.target.value}`);
  }
});
document.addEventListener("click", (event) => {
  if (event.target.matches("[data-check-all]")) {
    event.target.form.querySelectorAll("input[type=checkbox]").forEach((box) => { box.checked = true; });
  }
});

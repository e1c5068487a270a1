// Draws the figures, keeps filters in the URL without reloading plotly.js, copies configs. After theme.js.
"use strict";

const narrow = matchMedia("(max-width: 700px)");

function forWidth(layout, lines) {
  const annotations = layout.annotations || [];
  const ends = annotations.some((a) => a.name === "line-end");
  if (!narrow.matches || !lines || (layout.showlegend === false && !ends)) return layout;
  const legendHeight = 27 * lines + 24;
  return {
    ...layout,
    annotations: annotations.filter((a) => a.name !== "line-end"),
    showlegend: true,
    legend: {
      ...layout.legend,
      y: 0,
      yref: "container",
      yanchor: "bottom",
      orientation: "v",
      maxheight: legendHeight,
    },
    height: layout.height - 60 + legendHeight,
    margin: { ...layout.margin, r: 8, b: legendHeight + 20 },
  };
}

async function draw(box) {
  const url = `${box.dataset.figure}&theme=${theme()}`;
  box.dataset.drawing = url;
  try {
    const answer = await fetch(url);
    const figure = await answer.json();
    if (!answer.ok) throw new Error(figure.detail);
    if (box.dataset.drawing !== url) return;
    box.replaceChildren();
    await Plotly.newPlot(box, figure.data, forWidth(figure.layout, figure.data.length), {
      responsive: true,
      displayModeBar: false,
    });
    box.dataset.drawn = theme();
  } catch (error) {
    box.textContent = `This figure could not be drawn: ${error.message}`;
    box.dataset.drawn = "failed";
  }
}

function drawAll() {
  document.querySelectorAll("[data-figure]").forEach(draw);
}

let latest = 0;

async function show(href, push) {
  const turn = ++latest;
  const focused = document.activeElement && document.activeElement.id;
  document.body.setAttribute("aria-busy", "true");
  try {
    const answer = await fetch(href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.querySelector("[data-page]");
    if (turn !== latest) return;
    if (!answer.ok || !fresh) {
      location.assign(href);
      return;
    }
    document.querySelectorAll(".js-plotly-plot").forEach((box) => Plotly.purge(box));
    document.querySelector("[data-page]").replaceWith(fresh);
    document.title = page.title;
    if (push) history.pushState(null, "", href);
    const again = focused && document.getElementById(focused);
    if (again) again.focus({ preventScroll: true });
    drawAll();
  } catch (error) {
    location.assign(href);
  } finally {
    if (turn === latest) document.body.removeAttribute("aria-busy");
  }
}

document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-filter]");
  if (link && !event.metaKey && !event.ctrlKey && !event.shiftKey && event.button === 0) {
    event.preventDefault();
    show(link.href, true);
    return;
  }
  const copy = event.target.closest("[data-copy]");
  if (copy) {
    const said = copy.textContent;
    try {
      await navigator.clipboard.writeText(copy.dataset.copy);
      copy.textContent = "copied";
    } catch (error) {
      getSelection().selectAllChildren(copy.previousElementSibling || copy);
      copy.textContent = "press Ctrl+C";
    }
    setTimeout(() => (copy.textContent = said), 1600);
  }
});

document.addEventListener("submit", (event) => {
  const form = event.target.closest("form[data-filter]");
  if (!form) return;
  event.preventDefault();
  const query = new URLSearchParams(new FormData(form));
  show(`${location.pathname}?${query}#${form.dataset.section || ""}`, true);
});

addEventListener("popstate", () => show(location.href, false));
document.addEventListener("themechange", drawAll);
systemDark.addEventListener("change", drawAll);
narrow.addEventListener("change", drawAll);
drawAll();

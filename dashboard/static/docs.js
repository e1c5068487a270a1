// Sends the calls of the API page and shows what came back.
"use strict";

function urlOf(form) {
  const query = new URLSearchParams();
  let path = form.dataset.path;
  for (const field of form.elements) {
    if (!field.name || field.value === "") continue;
    if (path.includes(`{${field.name}}`)) path = path.replace(`{${field.name}}`, encodeURIComponent(field.value));
    else query.append(field.name, field.value);
  }
  return query.size ? `${path}?${query}` : path;
}

async function send(form) {
  const place = form.querySelector("output");
  const shown = document.createElement("pre");
  place.replaceChildren(shown);
  try {
    const answer = await fetch(urlOf(form));
    const type = answer.headers.get("content-type") || "";
    let text;
    if (type.includes("json")) text = JSON.stringify(await answer.json(), null, 2);
    else if (type.startsWith("text/")) text = await answer.text();
    else text = `${(await answer.blob()).size} bytes of ${type}`;
    shown.textContent = `${answer.status} ${answer.statusText}\n${text.slice(0, 20000)}`;
  } catch (error) {
    shown.textContent = `No answer: ${error.message}`;
  }
}

document.querySelectorAll("form[data-try]").forEach((form) => {
  const url = form.querySelector("[data-url]");
  const tell = () => url && (url.textContent = urlOf(form));
  form.addEventListener("input", tell);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
  tell();
});

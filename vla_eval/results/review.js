// EPISODES comes from episodes.js: one object an episode (or, in a comparison, a pair). Everything is set as text, never as markup.
"use strict";
const cards = document.getElementById("cards"), dialog = document.getElementById("one"), count = document.getElementById("count");
const selects = [...document.querySelectorAll("[data-filter]")];
const make = (tag, name, text) => { const node = document.createElement(tag); if (name) node.className = name; if (text !== undefined) node.textContent = text; return node; };
const kind = { success: "good", failure: "bad", error: "odd" };
let shown = [], now = -1;

for (const select of selects) {
  const values = [...new Set(EPISODES.map((e) => e.filters[select.dataset.filter]))].filter((v) => v !== "");
  for (const value of values) { const option = make("option", "", value); option.value = value; select.append(option); }
  select.addEventListener("change", filter);
}

const nodes = EPISODES.map((episode, index) => {
  const card = make("button", "card");
  card.type = "button";
  const sheet = episode.views.find((view) => view.sheet);
  if (sheet) {
    const image = make("img");
    image.loading = "lazy"; image.decoding = "async"; image.alt = "contact sheet of " + episode.title; image.src = sheet.sheet;
    card.append(image);
  } else card.append(make("span", "none", "not drawn"));
  card.append(make("strong", "", episode.title));
  for (const view of episode.views) card.append(make("span", kind[view.outcome], view.label));
  card.append(make("span", "soft", episode.text));
  card.addEventListener("click", () => open(index));
  cards.append(card);
  return card;
});

function filter() {
  shown = [];
  EPISODES.forEach((episode, index) => {
    const fits = selects.every((s) => !s.value || episode.filters[s.dataset.filter] === s.value);
    nodes[index].hidden = !fits;
    if (fits) shown.push(index);
  });
  count.textContent = `${shown.length} of ${EPISODES.length} shown`;
}

function open(index) {
  const episode = EPISODES[index];
  if (now >= 0) nodes[now].classList.remove("now");
  now = index;
  nodes[now].classList.add("now");
  document.getElementById("one-title").textContent = episode.title;
  document.getElementById("one-text").textContent = episode.text;
  const views = document.getElementById("one-views");
  views.replaceChildren();
  const videos = [], longest = Math.max(1, ...episode.views.map((view) => view.steps + 1));  // states: one time axis for both of a pair
  for (const view of episode.views) {
    const box = make("div");
    box.append(make("p", kind[view.outcome], view.label));
    if (view.video) {
      const video = make("video");
      video.controls = true; video.muted = true; video.playsInline = true; video.autoplay = true; video.src = view.video;
      videos.push(video);
      box.append(video);
    } else box.append(make("p", "note", view.hint));
    const lines = make("div");
    box.append(lines);
    if (view.sheet) { const strip = make("div", "strip"), image = make("img", "sheet"); image.alt = "contact sheet"; image.src = view.sheet; strip.append(image); box.append(strip); }
    views.append(box);
    for (const line of view.lines) {
      const button = make("button", "line"), share = (view.steps + 1) / longest;
      button.type = "button"; button.setAttribute("aria-label", `${line.name}: seek the video`);
      for (const [start, end] of line.spans) {
        const span = make("i"); span.style.left = `${100 * start / longest}%`; span.style.width = `${100 * (end - start) / longest}%`; button.append(span);
      }
      if (share < 1) { const rest = make("u"); rest.style.left = `${100 * share}%`; button.append(rest); }
      const at = make("b"); button.append(at);
      lines.append(make("span", "soft", line.name), button);
      const video = box.querySelector("video");
      if (video) {
        video.addEventListener("timeupdate", () => { at.style.left = `${100 * share * video.currentTime / (video.duration || 1)}%`; });
        button.addEventListener("click", (event) => { const r = button.getBoundingClientRect(); video.currentTime = Math.min(1, (event.clientX - r.left) / r.width / share) * (video.duration || 0); });
      }
    }
  }
  if (videos.length > 1) together(videos);
  if (!dialog.open) dialog.showModal();
}

// Two videos of one pair run as one: what happens to either happens to the other, each stopping at its own end.
function together(videos) {
  for (const video of videos) {
    const others = videos.filter((other) => other !== video);
    video.addEventListener("play", () => others.forEach((o) => { if (o.paused && !o.ended) o.play(); }));
    video.addEventListener("pause", () => { if (!video.ended) others.forEach((o) => o.pause()); });
    video.addEventListener("seeked", () => others.forEach((o) => {
      if (Math.abs(o.currentTime - video.currentTime) > 0.15) o.currentTime = Math.min(video.currentTime, o.duration || 0);
      if (!video.paused && o.paused && video.currentTime < o.duration) o.play();  // it had ended, and this one was wound back
    }));
  }
}

function move(step, wanted = () => true) {
  const order = shown.filter((index) => wanted(EPISODES[index]));
  if (!order.length) return;
  const after = step > 0 ? order.find((index) => index > now) : order.filter((index) => index < now).pop();
  const next = after ?? (step > 0 ? order[0] : order[order.length - 1]);
  open(next);
  nodes[next].scrollIntoView({ block: "nearest" });
}

dialog.addEventListener("click", (event) => {
  const step = event.target.dataset.move;
  if (step === "0" || event.target === dialog) dialog.close();
  else if (step) move(Number(step));
});
dialog.addEventListener("close", () => { for (const video of dialog.querySelectorAll("video")) video.pause(); nodes[now]?.focus(); });
document.addEventListener("keydown", (event) => {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey) return;
  const failed = (episode) => episode.failed;
  if (event.key === "n") move(1, failed);
  else if (event.key === "p") move(-1, failed);
  else if (event.key === "ArrowRight" && event.target.tagName !== "VIDEO") move(1);
  else if (event.key === "ArrowLeft" && event.target.tagName !== "VIDEO") move(-1);
  else return;
  event.preventDefault();
});
filter();

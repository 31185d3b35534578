"use strict";

// One control moves every clip that is shown, and the two on the stage.
(() => {
  const find = (name) => document.getElementById(name);
  const take = find("take");
  if (!take) return;
  const stage = find("stage");
  const against = find("against");
  const media = (root) => [...root.querySelectorAll("video, img")];
  const shownTake = () => document.querySelector(`[data-take="${take.value}"]`);

  const fillStage = () => {
    const pair = [media(shownTake())[0]];
    pair.push(media(shownTake()).find((each) => each.dataset.run === against.value) || pair[0]);
    stage.replaceChildren(...pair.map((each, i) => {
      const copy = each.cloneNode();
      copy.setAttribute(copy.tagName === "IMG" ? "alt" : "aria-label",
        i ? `${against.value}, over the reference` : "the reference");
      return copy;
    }));
  };
  const fillAgainst = () => {
    const chosen = against.value;
    const runs = media(shownTake()).slice(1).map((each) => each.dataset.run);
    against.replaceChildren(...runs.map((run) => new Option(run, run)));
    if (runs.includes(chosen)) against.value = chosen;
  };
  const showTake = () => {
    for (const each of document.querySelectorAll("[data-take]")) {
      each.hidden = each.dataset.take !== take.value;
    }
    fillAgainst();
    fillStage();
  };
  const showView = () => {
    stage.className = find("view").value;
    stage.style.setProperty("--cut", `${find("slide").value}%`);
    find("slide-number").value = `${find("slide").value} %`;
    find("slide").disabled = find("view").value !== "slide";
  };
  find("view").addEventListener("change", showView);
  find("slide").addEventListener("input", showView);
  showTake();
  showView();

  const slider = find("frame");
  if (!slider) {
    take.addEventListener("change", showTake);
    against.addEventListener("change", fillStage);
    return;
  }
  const play = find("play");
  const count = Number(slider.max) + 1;
  let timer = null;
  const clips = () => [...media(shownTake()), ...media(stage)];
  const seek = (frame) => {
    const wanted = Math.min(Math.max(frame, 0), count - 1);
    slider.value = wanted;
    slider.setAttribute("aria-valuetext", `frame ${wanted + 1} of ${count}`);
    find("frame-number").value = `${wanted + 1} of ${count}`;
    for (const clip of clips()) {
      // The middle of a frame: its edges may round to a neighbour.
      const go = () => { clip.currentTime = (wanted + 0.5) * clip.duration / count; };
      if (clip.readyState) go(); else clip.addEventListener("loadedmetadata", go, { once: true });
    }
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
    play.setAttribute("aria-pressed", "false");
  };
  const start = () => {
    const rate = Math.min(count / (clips()[0].duration || 1), 30);
    timer = setInterval(() => {
      // The next frame waits until every clip shows this one.
      if (clips().every((clip) => !clip.seeking)) seek((Number(slider.value) + 1) % count);
    }, 1000 / rate);
    play.textContent = "Pause";
    play.setAttribute("aria-pressed", "true");
  };
  const step = (by) => () => { stop(); seek(Number(slider.value) + by); };
  play.addEventListener("click", () => (timer ? stop() : start()));
  find("back").addEventListener("click", step(-1));
  find("forth").addEventListener("click", step(1));
  slider.addEventListener("input", () => { stop(); seek(Number(slider.value)); });
  take.addEventListener("change", () => { showTake(); seek(Number(slider.value)); });
  against.addEventListener("change", () => { fillStage(); seek(Number(slider.value)); });
  seek(0);
})();

// Cells of heat maps can be read with a pointer.
for (const figure of document.querySelectorAll("[data-map]")) {
  const map = JSON.parse(figure.dataset.map);
  const [left, top, width, height] = map.box;
  const drawing = figure.querySelector("svg");
  const output = figure.querySelector("output");
  drawing.addEventListener("pointerleave", () => { output.value = ""; });
  drawing.addEventListener("pointermove", (event) => {
    const place = drawing.getBoundingClientRect();
    const across = ((event.clientX - place.left) / place.width - left) / width;
    const down = ((event.clientY - place.top) / place.height - top) / height;
    const row = Math.floor(down * map.rows.length);
    const column = Math.floor(across * map.columns.length);
    const value = map.values[row]?.[column];
    output.value = value == null ? "" :
      `layer ${map.rows[row]}, ${map.across} ${map.columns[column]}: ${value.toPrecision(3)}`;
  });
}

"use strict";
const main = document.querySelector("main");
let shown = "";
const load = async () => {
  if (document.hidden) return; // the server reads runs for those who look
  try {
    const answer = await fetch("/body");
    if (!answer.ok) throw new Error(answer.status); // another program has the port
    const text = await answer.text();
    if (text === shown) return;
    const before = [...main.querySelectorAll(".scroll")].map((e) => [e.scrollLeft, e.scrollTop]);
    const held = [...main.querySelectorAll(".scroll")].indexOf(document.activeElement);
    main.innerHTML = shown = text;
    main.querySelectorAll(".scroll").forEach((e, at) => {
      if (at === held) e.focus({ preventScroll: true });
      if (before[at]) [e.scrollLeft, e.scrollTop] = before[at];
    });
  } catch {
    shown = "";
    const lead = main.querySelector(".lead");
    if (lead) lead.textContent = "The monitor has ended; this is what it showed last.";
  }
};
const turn = async () => {
  await load();
  setTimeout(turn, 1000);
};
document.addEventListener("visibilitychange", load);
turn();

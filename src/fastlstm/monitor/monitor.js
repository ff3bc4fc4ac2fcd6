"use strict";
const main = document.querySelector("main");
const events = new EventSource("/events");
events.onmessage = async () => {
  const answer = await fetch("/body");
  if (!answer.ok) return;
  const before = [...main.querySelectorAll(".scroll")].map((e) => [e.scrollLeft, e.scrollTop]);
  main.innerHTML = await answer.text();
  main.querySelectorAll(".scroll").forEach((e, at) => {
    if (before[at]) [e.scrollLeft, e.scrollTop] = before[at];
  });
};
events.onerror = () => {
  const lead = main.querySelector(".lead");
  if (lead) lead.textContent = "The monitor has ended; this is what it showed last.";
};

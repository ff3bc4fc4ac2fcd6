"use strict";
const main = document.querySelector("main");
let events;
const show = (event) => {
  const before = [...main.querySelectorAll(".scroll")].map((e) => [e.scrollLeft, e.scrollTop]);
  main.innerHTML = event.data;
  main.querySelectorAll(".scroll").forEach((e, at) => {
    if (before[at]) [e.scrollLeft, e.scrollTop] = before[at];
  });
};
const listen = () => {
  if (events) events.close();
  if (document.hidden) return; // the server reads runs for those who look
  events = new EventSource("/events");
  events.onmessage = show;
  events.onerror = () => {
    const lead = main.querySelector(".lead");
    if (lead) lead.textContent = "The monitor has ended; this is what it showed last.";
  };
};
document.addEventListener("visibilitychange", listen);
listen();

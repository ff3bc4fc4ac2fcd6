// A wide table scrolls by the keyboard, too; the buttons of each block of code have a name of their own.
document$.subscribe(() => requestAnimationFrame(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  document.querySelectorAll(".md-code__nav").forEach((nav, at) => { nav.ariaLabel = `Code ${at + 1}`; });
}));

// A wide table scrolls by the keyboard, too.
document$.subscribe(() => requestAnimationFrame(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap"))
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
}));

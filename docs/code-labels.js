// Screen readers tell the buttons of code blocks apart by these labels; the theme adds the buttons as blocks come into view.
new MutationObserver(() => {
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((nav) => {
    const block = [...document.querySelectorAll("pre")].indexOf(nav.closest("pre")) + 1;
    nav.setAttribute("aria-label", `Code block ${block}`);
  });
}).observe(document.body, { childList: true, subtree: true });

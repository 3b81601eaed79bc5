"use strict";
// Sections are folded; a link to one opens it.
(() => {
  const reveal = (hash) => {
    const section = hash && document.getElementById(hash.slice(1));
    if (!section) return;
    section.querySelectorAll(":scope > details").forEach((e) => (e.open = true));
    for (let e = section; e; e = e.parentElement) {
      if (e.localName === "details") e.open = true;
    }
    section.scrollIntoView();
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (link) reveal(link.getAttribute("href"));
  });
  addEventListener("hashchange", () => reveal(location.hash));
  reveal(location.hash);
})();

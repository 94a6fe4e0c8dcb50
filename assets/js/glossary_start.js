/* Makes every `[data-term]` a button that opens the glossary, and fetches glossary.js with the first one that is used. */
(function () {
  "use strict";

  const HERE = "[data-term]";
  let wanted = null;

  function dress(node) {
    node.classList.add("qe-term");
    node.setAttribute("aria-haspopup", "dialog");
    if (node.tagName === "BUTTON") return;
    node.setAttribute("role", "button");
    node.tabIndex = 0;
  }

  const seek = (node) => {
    if (!node.querySelectorAll) return;
    if (node.matches(HERE)) dress(node);
    node.querySelectorAll(HERE).forEach(dress);
  };

  function used(event) {
    const node = event.target.closest && event.target.closest(HERE);
    if (!node || (event.key && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (window.qeGlossary) return window.qeGlossary(node);
    if (!wanted) {
      const script = document.createElement("script");
      script.src = window.qeGlossarySource;
      script.onload = () => window.qeGlossary(wanted);
      document.head.append(script);
    }
    wanted = node;
  }

  for (const name of ["click", "keydown"]) document.addEventListener(name, used, true);
  new MutationObserver((changes) => {
    for (const change of changes) change.addedNodes.forEach(seek);
  }).observe(document.documentElement, { childList: true, subtree: true });
})();

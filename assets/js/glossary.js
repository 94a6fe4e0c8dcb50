/* The glossary: a term's words, formula and place in our code, in a small dialog beside the term. Comes with the first
 * term that is used (glossary_start.js) and fetches the words then; knows neither board nor lessons. */
(function (root) {
  "use strict";

  let data = null;
  let box = null;
  let from = null; // the term that is open

  const lang = () => (document.documentElement.lang.slice(0, 2) === "zh" ? "zh" : "en");

  function add(parent, tag, className, words) {
    const node = parent.appendChild(document.createElement(tag));
    if (className) node.className = className;
    if (words !== undefined) node.textContent = words;
    return node;
  }

  function write(parent, nodes) {
    for (const [kind, first, second] of nodes) {
      if (kind === "") parent.append(first);
      else if (kind === "frac") {
        const node = add(parent, "span", "qe-frac");
        write(add(node, "span"), first);
        add(node, "i", "", " / ");
        write(add(node, "span"), second);
      } else write(add(parent, kind), first);
    }
  }

  async function read() {
    if (data && data.lang === lang()) return data;
    const answer = await fetch(`qe/glossary?lang=${lang()}`);
    if (!answer.ok) throw new Error(String(answer.status));
    return (data = await answer.json());
  }

  function close(back) {
    if (!box) return;
    box.remove();
    box = null;
    if (from) from.setAttribute("aria-expanded", "false");
    if (back && from && from.isConnected) from.focus({ preventScroll: true });
    from = null;
  }

  async function open(node) {
    close(false);
    from = node;
    let words;
    try {
      words = await read();
    } catch (error) {
      root.console.warn(`glossary: ${error.message}`);
      return;
    }
    const term = words.terms[node.dataset.term];
    if (!term || from !== node) return;
    const { ui } = words;
    box = add(document.body, "div", "qe-pop");
    box.setAttribute("role", "dialog");
    box.setAttribute("aria-labelledby", "qe-pop-name");
    box.tabIndex = -1;
    add(box, "h2", "", term.name).id = "qe-pop-name";
    add(box, "p", "", term.say);
    const formula = add(box, "p", "qe-formula");
    formula.dir = "ltr";
    write(formula, term.formula);
    const where = add(box, "p", "qe-pop-where", `${ui.where} `);
    add(where, "code", "", term.where);
    const bar = add(box, "p", "qe-pop-bar");
    const act = (name, does) => {
      const button = add(bar, "button", "", name);
      button.type = "button";
      button.addEventListener("click", does);
    };
    act(ui.close, () => close(true));
    act(ui.all, all);
    node.setAttribute("aria-expanded", "true");
    place(node);
    box.focus({ preventScroll: true });
  }

  /** Under the term where there is room, else above it, and always inside the window. */
  function place(node) {
    const at = node.getBoundingClientRect();
    const { width, height } = box.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - width - 8));
    const below = at.bottom + 6;
    const top = below + height <= innerHeight - 8 ? below : Math.max(8, at.top - height - 6);
    box.style.left = `${left}px`;
    box.style.top = `${Math.max(8, Math.min(top, innerHeight - height - 8))}px`;
  }

  /** Shows the whole list, on the About tab. */
  function all() {
    close(false);
    const tab = document.querySelector("[role=tab][id*=about], [role=tab][data-tab-id=about]");
    if (tab) tab.click();
    const look = () => {
      const head = document.querySelector("#qe-glossary h3");
      if (!head || !head.offsetParent) return void requestAnimationFrame(look);
      head.scrollIntoView();
      head.focus({ preventScroll: true });
    };
    look();
  }

  // On the window, so that they come before those of the page behind.
  root.addEventListener(
    "click",
    (event) => {
      if (box && !box.contains(event.target)) close(false);
    },
    true,
  );

  root.addEventListener(
    "keydown",
    (event) => {
      if (!box) return;
      const inside = box.contains(event.target);
      if (event.key === "Escape") {
        event.preventDefault();
        event.stopImmediatePropagation();
        close(true);
      } else if (inside && event.key === "Tab") {
        // From the dialog to its buttons, and from the last one back to the term.
        const buttons = [...box.querySelectorAll("button")];
        const next = buttons.indexOf(document.activeElement) + (event.shiftKey ? -1 : 1);
        event.preventDefault();
        if (buttons[next]) buttons[next].focus();
        else close(true);
      }
      if (inside) event.stopImmediatePropagation(); // the page behind shall not move
    },
    true,
  );

  addEventListener("resize", () => box && from && place(from));
  addEventListener("scroll", () => box && from && from.isConnected && place(from), true);
  new MutationObserver(() => close(false)).observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });

  /** Opens the term of `node`, or closes it where it is open. */
  root.qeGlossary = (node) => (from === node ? close(true) : open(node));
})(window);

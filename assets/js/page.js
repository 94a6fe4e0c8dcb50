/* View settings that live in this browser alone: theme, projector mode, text size, the side panel's key.
 * Runs before the first paint of the page's components. Knows nothing of runs or traces. */
(function () {
  "use strict";

  const STORE = "qevict-view";
  const SCALES = [1, 1.15, 1.3, 1.5, 1.8];
  const root = document.documentElement;

  function read() {
    try {
      return JSON.parse(localStorage.getItem(STORE)) || {};
    } catch {
      return {};
    }
  }

  const tall = window.matchMedia("(min-height: 900px)");
  const state = Object.assign({ theme: "", projector: false, scale: 1 }, read());

  function save() {
    try {
      localStorage.setItem(STORE, JSON.stringify(state));
    } catch {
      /* private browsing: the settings hold until the page closes */
    }
  }

  const wanted = () => new URL(location.href).searchParams.get("__theme") || state.theme || "light";

  function apply() {
    const dark = wanted() === "dark" && !state.projector;
    document.body.classList.toggle("dark", dark);
    document.body.classList.toggle("qe-projector", state.projector);
    root.style.colorScheme = dark ? "dark" : "light";
    // Of 1,080 lines the smallest print then has 18 pixels; fewer lines must still hold the whole board.
    const scale = Math.max(state.scale, state.projector ? (tall.matches ? 1.4 : 1.3) : 1);
    root.style.setProperty("--qe-scale", String(scale));
    for (const [id, on] of [["qe-projector-button", state.projector], ["qe-theme-button", dark]]) {
      const button = document.getElementById(id);
      if (button) button.setAttribute("aria-pressed", String(on));
    }
    for (const board of window.qeBoards ? window.qeBoards.values() : []) {
      if (board.destroyed) continue;
      board.setProjector(state.projector);
      board.setScale(scale);
      board.setTheme("auto");
    }
  }

  function sidebar(open) {
    const panel = document.querySelector(".sidebar");
    const button = panel && panel.querySelector(".toggle-button");
    if (button && panel.classList.contains("open") !== open) button.click();
  }

  const actions = {
    theme() {
      const url = new URL(location.href);
      state.theme = wanted() === "dark" ? "light" : "dark";
      if (url.searchParams.has("__theme")) {
        url.searchParams.set("__theme", state.theme);
        history.replaceState(history.state, "", url);
      }
    },
    projector() {
      state.projector = !state.projector;
      sidebar(!state.projector);
    },
    larger() {
      state.scale = SCALES.find((x) => x > state.scale + 0.01) || SCALES[SCALES.length - 1];
    },
    smaller() {
      state.scale = [...SCALES].reverse().find((x) => x < state.scale - 0.01) || 1;
    },
  };

  const FIELDS = "input, textarea, select, [contenteditable=''], [contenteditable=true], [role=textbox], [role=combobox]";
  const writing = (node) => Boolean(node && node.closest && node.closest(FIELDS));

  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "s" || event.defaultPrevented) return;
    if (event.ctrlKey || event.metaKey || event.altKey || writing(event.target)) return;
    const panel = document.querySelector(".sidebar");
    if (panel && (document.body.dataset.qeTab || "live") === "live") sidebar(!panel.classList.contains("open"));
  });

  window.qePage = {
    act(name) {
      actions[name]();
      save();
      apply();
    },
    tab(name) {
      document.body.dataset.qeTab = name;
    },
    language(lang) {
      root.lang = lang === "zh" ? "zh-CN" : "en";
      const words = (window.qePageWords || {})[lang] || {};
      for (const name in words) {
        const button = document.getElementById(`qe-${name}-button`);
        if (!button) continue;
        button.title = words[name];
        if (!/[a-z\u4e00-\u9fff]{2}/i.test(button.textContent)) button.setAttribute("aria-label", words[name]);
      }
    },
    ready() {
      apply();
      if (state.projector || innerWidth < 900) sidebar(false);
    },
  };

  apply();
  // The page's own listener follows the system's colours; ours must have the last word.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  tall.addEventListener("change", apply);
  system.addEventListener("change", () => setTimeout(apply, 0));
})();

/* The sheet of keys. Fetched when somebody first asks for it; a file that plays offline has it from the start. */
(function (root) {
  "use strict";

  const { el } = root.QEvictView.parts;
  const KEYS = [
    ["← →  PgUp PgDn", "view.key_step"],
    ["↑ ↓", "view.key_row"],
    ["Home End", "view.key_ends"],
    ["Space", "view.key_play"],
    ["[ ]", "view.key_speed"],
    ["L", "view.key_loop"],
    ["Shift L", "view.key_range"],
    ["P", "view.key_promotion"],
    [", .", "view.key_window"],
    ["+ - 0", "view.key_zoom"],
    ["R", "view.key_regret"],
    ["S", "view.key_panel"],
  ];
  const LAST = [
    ["Esc", "view.key_close"],
    ["?", "view.key_sheet"],
  ];

  Object.assign(root.QEvictView.prototype, {
    _sheet(open) {
      const { ui } = this;
      if (ui.sheet) ui.sheet.remove();
      ui.sheet = open ? this._buildSheet() : null;
      (open ? ui.sheet.querySelector("button") : this.host).focus({ preventScroll: true });
    },

    _buildSheet() {
      const sheet = el("div", "qe-sheet", this.host, { role: "dialog", "aria-label": this._t("view.keys") });
      el("b", "", sheet).textContent = this._t("view.keys");
      const list = el("dl", "", sheet);
      for (const [keys, key] of [...KEYS, ...(this.moreKeys || []), ...LAST]) {
        if (key === "view.key_panel" && !document.querySelector(".sidebar")) continue;
        const name = el("dt", "", list);
        for (const part of keys.split(/\s+/)) el("kbd", "", name).textContent = part;
        el("dd", "", list).textContent = this._t(key);
      }
      const close = el("button", "qe-toggle", sheet, { type: "button" });
      close.textContent = this._t("view.close");
      close.addEventListener("click", () => this._sheet(false));
      return sheet;
    },
  });
})(window);

/* The elements of QEvictView, in the order in which they stand on the page. */
(function (root) {
  "use strict";

  const { el, icon, SPEEDS } = root.QEvictView.parts;

  // What nobody needs before asking for it: each is fetched then, with the others, and replaced by what came.
  for (const name of ["_sheet", "_tip", "_walk"]) {
    root.QEvictView.prototype[name] = function (...values) {
      this.options.later().then(() => this.destroyed || this[name](...values), () => {});
    };
  }

  Object.assign(root.QEvictView.prototype, {
    _build() {
      const { host } = this;
      const ui = (this.ui = {});
      host.classList.add("qe");
      host.tabIndex = 0;
      host.setAttribute("role", "group");
      host.setAttribute("aria-label", this._t("view.label"));
      ui.legend = el("div", "qe-legend", host);
      this._legend();

      const status = el("div", "qe-status", host);
      ui.where = el("b", "qe-where", status, { "data-term": "routing" });
      ui.firstRouting = el("span", "qe-note", status);
      ui.counts = el("span", "qe-counts", status);
      ui.countNodes = ["promoted", "demoted", "evicted_count", "aged"].map((name) => {
        const item = el("span", `qe-count qe-count-${name}`, ui.counts);
        el("i", "", item, { "aria-hidden": "true" });
        const term = { promoted: "promotion", demoted: "demotion" }[name];
        el("span", "", item, term ? { "data-term": term } : {}).textContent = this._t(`view.${name}`);
        return el("b", "", item);
      });
      ui.note = el("div", "qe-message", host, { role: "status" });
      ui.progress = el("progress", "qe-progress", host);
      ui.live = el("div", "qe-hidden", host, { "aria-live": "polite" });

      const title = el("div", "qe-title", host);
      ui.rowName = el("b", "", title);
      ui.rowMoves = el("span", "qe-note", title);
      ui.facts = el("span", "qe-facts", title);
      ui.lanes = el("div", "qe-lanes", host);
      ui.lanesCanvas = el("canvas", "", ui.lanes, { role: "img" });
      ui.laneLabels = ["full", "quant", "evicted"].map((name) => {
        const label = el("div", `qe-lane qe-lane-${name}`, ui.lanes, { "aria-hidden": "true" });
        el("b", "", label);
        el("span", "", label);
        el("span", "qe-lane-size", label);
        return label;
      });

      const meters = el("div", "qe-meters", host);
      this._buildMemory(meters);
      ui.curves = el("div", "qe-curves", meters);
      const chart = (name) => {
        const box = el("div", "qe-curve", ui.curves);
        const head = el("div", "qe-curve-head", box);
        const out = { name: el("b", "", head, { "data-term": name }), long: el("span", "qe-note", head), value: el("strong", "", head), line: el("span", "qe-note qe-line", box) };
        out.sub = el("span", "", out.line);
        out.more = el("span", "qe-more", out.line);
        out.name.textContent = this._t(`view.${name}`);
        out.long.textContent = this._t(`view.${name}_long`);
        const plot = el("div", "qe-plot", box);
        out.canvas = el("canvas", "", plot, { role: "img" });
        out.pending = el("span", "qe-pending", plot);
        return out;
      };
      ui.fmm = chart("fmm");
      ui.churn = chart("churn");
      ui.noReference = el("p", "qe-note qe-no-reference", meters);
      ui.noReference.textContent = this._t("view.no_reference");

      this._buildText();
      ui.atlasTitle = el("div", "qe-title qe-note qe-atlas-title", host);
      ui.atlas = el("div", "qe-atlas", host);
      ui.frameCanvas = el("canvas", "", ui.atlas, { "aria-hidden": "true" });
      ui.atlasCanvas = el("canvas", "", ui.atlas, { role: "img" });
      ui.overlayCanvas = el("canvas", "", ui.atlas, { "aria-hidden": "true" });
      ui.brush = el("div", "qe-brush", host, { title: this._t("view.zoom") });
      ui.brushPart = el("div", "", ui.brush);

      this._buildTransport();
      this._buildPrompt();
      this._resetText();

      const table = el("table", "qe-hidden", host);
      ui.caption = el("caption", "", table);
      const head = el("tr", "", el("thead", "", table));
      for (const name of ["window", "from", "to"]) el("th", "", head, { scope: "col" }).textContent = this._t(`view.table_${name}`);
      ui.tableBody = el("tbody", "", table);

      const tip = (ui.tip = el("div", "qe-tip", host, { role: "tooltip" }));
      tip.hidden = true;
      ui.tipTitle = el("b", "", tip);
      ui.tipText = el("q", "qe-tip-text", tip);
      ui.tipTier = el("span", "qe-note", tip);
      ui.tipCanvas = el("canvas", "", tip);
      ui.tipScore = el("span", "qe-note", tip);
    },

    _buildMemory(parent) {
      const { ui } = this;
      const box = el("div", "qe-memory", parent);
      const head = el("div", "qe-memory-head", box);
      el("b", "", head, { "data-term": "persistent" }).textContent = this._t("view.memory");
      el("span", "qe-note", head).textContent = this._t("view.memory_all");
      ui.memText = el("strong", "", head);
      ui.mem = el("div", "qe-bar", box, { role: "img" });
      ui.memFull = el("div", "qe-bar-full", ui.mem);
      const names = ["sink", "local", "full", "codes", "metadata", "shadow"];
      ui.memParts = names.map((name) => el("div", `qe-part qe-mem-${name}`, ui.mem));
      ui.memBudget = el("div", "qe-bar-budget", ui.mem);
      const words = el("div", "qe-mem-words", box);
      ui.memWords = names.map((name) => {
        const item = el("span", "", words);
        el("i", `qe-swatch qe-mem-${name}`, item);
        el("span", "qe-note", item, ["metadata", "shadow"].includes(name) ? { "data-term": name } : {});
        el("b", "", item);
        return item;
      });
      ui.memLimit = el("b", "qe-limit", words, { "data-term": "budget" });
    },

    _buildTransport() {
      const { ui } = this;
      const bar = (ui.transport = el("div", "qe-transport", this.host, { role: "toolbar" }));
      const button = (name, act) => {
        const made = el("button", "qe-icon", bar, { type: "button", "aria-label": this._t(`view.${name}`), title: this._t(`view.${name}`) });
        icon(made, name);
        made.addEventListener("click", act);
        return made;
      };
      ui.first = button("first", () => this._user(() => this.seek(0)));
      ui.back = button("back", () => this._user(() => this.step(-1)));
      ui.play = button("play", () => (this.playing ? this.pause() : this.play()));
      ui.forward = button("forward", () => this._user(() => this.step(1)));
      ui.last = button("last", () => this._user(() => this._toEnd()));
      this._playShown = undefined;
      ui.slider = el("input", "qe-slider", bar, { type: "range", min: "0", max: "0", step: "1", "aria-label": this._t("view.position") });
      ui.slider.addEventListener("input", () => this._user(() => this.seek(Number(ui.slider.value))));
      ui.position = el("span", "qe-position", bar);
      const toggle = (name, act) => {
        const made = el("button", "qe-toggle", bar, { type: "button", "aria-pressed": "false" });
        made.textContent = this._t(`view.${name}`);
        made.addEventListener("click", act);
        return made;
      };
      ui.goLive = toggle("go_live", () => this.goLive());
      ui.goLive.classList.add("qe-live");
      ui.speed = el("select", "qe-speed", bar, { "aria-label": this._t("view.speed"), title: this._t("view.speed") });
      for (const speed of SPEEDS) {
        const option = el("option", "", ui.speed, { value: String(speed) });
        option.textContent = `${speed}×`;
      }
      ui.speed.value = String(this.speed);
      ui.speed.addEventListener("change", () => this.setSpeed(ui.speed.value));
      ui.loop = toggle("loop", () => this.setLoop(this.loop ? null : []));
      ui.stop = toggle("stop_at_promotion", () => this._flip("stopAtPromotion"));
      ui.regret = toggle("regret", () => this._flip("showRegret"));
      ui.keys = el("button", "qe-icon", bar, { type: "button", "aria-label": this._t("view.keys"), title: this._t("view.keys") });
      ui.keys.textContent = "?";
      ui.keys.addEventListener("click", () => this._sheet(true));
    },

    _buildText() {
      const { ui } = this;
      const box = (ui.textBox = el("section", "qe-text", this.host, { "aria-label": this._t("view.text") }));
      const head = el("div", "qe-text-head", box);
      el("b", "", head).textContent = this._t("view.text");
      ui.textNote = el("span", "qe-note", head);
      ui.generated = el("div", "qe-tokens qe-generated", box, { dir: "auto", tabindex: "0", "aria-label": this._t("view.text"), role: "group" });
      this._pointTokens(ui.generated);
    },

    _buildPrompt() {
      const { ui } = this;
      ui.prompt = el("details", "qe-prompt", this.host);
      ui.promptName = el("summary", "", ui.prompt);
      ui.promptText = el("div", "qe-tokens", ui.prompt, { dir: "auto", tabindex: "0", role: "group", "aria-label": this._t("view.prompt_text") });
      ui.prompt.addEventListener("toggle", () => this._invalidate("text"));
      this._pointTokens(ui.promptText);
    },

    _pointTokens(node) {
      node.addEventListener("pointerover", (event) => {
        if (event.target.dataset.w) this._point(Number(event.target.dataset.w), null, event);
      });
      node.addEventListener("pointerleave", () => this._point(null));
    },

    _flip(name) {
      this[name] = !this[name];
      this._invalidate("all");
    },

    _user(act) {
      this.pause();
      act();
    },

    _toEnd() {
      if (this.source && !this.trace.end) this.goLive();
      else this.seek(this.trace.steps.length - 1);
    },
  });
})(window);

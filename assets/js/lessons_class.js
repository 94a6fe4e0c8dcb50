/* The class: begins one, sends what is answered here, shows how many devices chose what. Part of QEvictLessons.
 * A device goes by a random number; no name is asked. */
(function (root) {
  "use strict";

  const { el } = root.QEvictView.parts;
  const { TIERS, LETTERS } = root.QEvictLessons;
  const CLASS = "qevict-class";
  const COUNT_EVERY = 2000; // ms between two looks at a class's tally

  Object.assign(root.QEvictLessons.prototype, {
    /** The class that the page's address names, or the one that was begun here. */
    _class() {
      const code = new URL(location.href).searchParams.get("class");
      if (code && /^[a-z0-9]{1,8}$/.test(code)) return { code, asks: false };
      const begun = sessionStorage.getItem(CLASS);
      return begun ? { code: begun, asks: true } : null;
    },

    async begin() {
      const answer = await fetch("qe/class", { method: "POST" }).catch(() => null);
      if (!answer || !answer.ok) return;
      this.class = { code: (await answer.json()).code, asks: true };
      sessionStorage.setItem(CLASS, this.class.code);
      this.draw();
    },

    /** Lets the teacher's board be followed, and this device follow it; once for each class. */
    _follows() {
      const { board } = this;
      const now = this.class ? this.class.code : "";
      if (now === (this.followed || "")) return;
      this.followed = now;
      board.options.later().then(() => {
        if (this.followed !== now) return;
        if (this.class) board.joinClass(this, now, this.class.asks);
        else board._leave();
      });
    },

    _end() {
      sessionStorage.removeItem(CLASS);
      this.class = null;
      this.draw();
    },

    /** Sends what was answered on this device, under a random name that says nothing about it. */
    _send(picks) {
      if (!this.class || this.class.asks) return;
      if (!this.store.device) this._save("device", [...crypto.getRandomValues(new Uint32Array(3))].join("-"));
      const body = { question: this.key, device: this.store.device, picks: picks.map((pick) => (typeof pick === "number" ? pick : TIERS.indexOf(pick))) };
      fetch(`qe/class/${this.class.code}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })
        .then((answer) => (this.sent = answer.ok ? "sent" : "not_sent"), () => (this.sent = "not_sent"))
        .then(() => this.draw());
    },

    /** Fetches the tally while its question is on the screen, and draws it where it stands. */
    async _count() {
      clearTimeout(this._counting);
      const { key } = this;
      if (!this.class || !this.class.asks || !this.step.question) return;
      if (this.host.offsetParent && !document.hidden) {
        const answer = await fetch(`qe/class/${this.class.code}?question=${encodeURIComponent(key)}`).catch(() => null);
        if (!this.at || key !== this.key || !this.class) return;
        if (answer && answer.status === 404) return this._end();
        if (answer && answer.ok) this._tally(await answer.json());
      }
      clearTimeout(this._counting);
      this._counting = setTimeout(() => this.at && this._count(), COUNT_EVERY);
    },

    _tally({ answered, counts }) {
      const box = this.host.querySelector(".qe-class-tally");
      if (!box) return;
      const { question, marks } = this.step;
      box.replaceChildren();
      el("p", "", box).textContent = this._w("class_answered", { n: answered });
      counts.forEach((part, i) => {
        if (question.kind === "predict") el("b", "", box).textContent = marks[i].label;
        part.forEach((count, j) => {
          const line = el("div", "qe-class-bar", box);
          el("span", "", line).textContent = question.kind === "predict" ? LETTERS[TIERS[j]] : String(j + 1);
          el("i", "", el("span", "", line)).style.width = `${answered ? (100 * count) / answered : 0}%`;
          el("span", "", line).textContent = String(count);
        });
      });
    },

    /** The link large, with its QR code, for a room. Drawn by this server: no network is needed but the class's own. */
    _scan(link) {
      const sheet = el("dialog", "qe-scan", document.body, { "aria-label": this._w("class_scan") });
      el("img", "", sheet, { alt: link, src: `qe/qr?link=${encodeURIComponent(link)}` });
      el("b", "", sheet, { dir: "ltr" }).textContent = link;
      if (/^(localhost|127\.|\[::1\])/.test(location.hostname)) el("p", "", sheet).textContent = this._w("class_local");
      const close = el("button", "", sheet, { type: "button" });
      close.textContent = this._w("close");
      close.addEventListener("click", () => sheet.close());
      sheet.addEventListener("close", () => {
        sheet.remove();
        const back = this.host.querySelector('[data-name="class-scan"]');
        if (back) back.focus({ preventScroll: true });
      });
      sheet.showModal();
    },

    _classPart(foot) {
      const line = el("p", "qe-step-class", foot);
      this._follows();
      if (!this.class) return void this._button(line, "class", "qe-plain", this._w("class_begin"), () => this.begin());
      if (!this.class.asks) {
        el("span", "", line).textContent = this._w("class_in", { code: this.class.code });
        if (this.sent) el("span", "", line, { role: "status" }).textContent = this._w(`class_${this.sent}`);
        return;
      }
      const link = `${location.origin}${location.pathname}?class=${this.class.code}`;
      el("b", "", line, { dir: "ltr" }).textContent = link;
      this._button(line, "class-scan", "qe-plain", this._w("class_scan"), () => this._scan(link));
      this._button(line, "class-end", "qe-plain", this._w("class_end"), () => this._end());
    },
  });
})(window);

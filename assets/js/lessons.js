/* The lessons: shows one step at a time beside a board, asks, and keeps what was answered in this browser alone.
 * A step sets the board to one place and takes back exactly what it set. Words and figures come from the server;
 * token text is untrusted and only ever becomes textContent. Fetches tier_lesson and lessons_class itself. */
(function (root) {
  "use strict";

  const STORE = "qevict-lessons";
  const FIELDS = "input, textarea, select, [contenteditable=''], [contenteditable=true], [role=textbox], [role=combobox]";
  const TIERS = ["full", "quant", "evicted"];
  const LETTERS = { full: "F", quant: "Q", evicted: "E" };
  const WAIT = 60; // ms between two looks for the board
  let el; // comes with the board

  const fill = (words, values) => words.replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all));

  function kept() {
    try {
      const found = JSON.parse(localStorage.getItem(STORE)) || {};
      return { at: found.at || [0, 0], done: found.done || {}, answers: found.answers || {}, device: found.device || "" };
    } catch {
      return { at: [0, 0], done: {}, answers: {} };
    }
  }

  class QEvictLessons {
    /** `open(id)` starts a lesson's run on the Live tab. */
    constructor(host, board, open) {
      this.host = host;
      this.board = board;
      this.open = open;
      this.store = kept();
      this.traces = new Map();
      this.base = null;
      this.class = this._class();
      host.classList.add("qe-ready");
      document.addEventListener("keydown", (event) => this._key(event), true);
      board.host.addEventListener("qe-event", () => this._reached());
      new MutationObserver(() => this.read()).observe(document.documentElement, { attributes: true, attributeFilter: ["lang"] });
    }

    /** Fetches the lessons in the page's language and shows the step that was shown last. */
    async read() {
      const lang = document.documentElement.lang.slice(0, 2) === "zh" ? "zh" : "en";
      if (this.data && this.data.lang === lang) return;
      try {
        const answer = await fetch(`qe/lessons?lang=${lang}`);
        if (!answer.ok) throw new Error(String(answer.status));
        const first = !this.data;
        this.data = await answer.json();
        if (first) await this.go(...this._valid(this.store.at));
        else this.draw();
      } catch (error) {
        this.host.textContent = this.data ? fill(this._w("failed"), { why: error.message }) : String(error.message);
      }
    }

    get lesson() {
      return this.data.lessons[this.at[0]];
    }

    get step() {
      return this.lesson.steps[this.at[1]];
    }

    get key() {
      return `${this.lesson.id}.${this.step.name}`;
    }

    _w(name, values) {
      return fill(this.data.ui[name] === undefined ? name : this.data.ui[name], values || {});
    }

    _valid([lesson, step]) {
      const found = this.data.lessons[lesson];
      return found && found.steps[step] ? [lesson, step] : [0, 0];
    }

    /** Leaves the step that is shown, if any, and enters another. The last wish wins. */
    async go(lesson, step) {
      const wish = (this.wish = [lesson, step]);
      const { trace } = this.data.lessons[lesson].steps[step];
      const ready = this.traces.get(trace) || (await this._fetch(trace));
      if (wish !== this.wish || this.board.destroyed) return;
      this.leave();
      this.at = wish;
      this.base = this.board.snapshot();
      this._enter(ready);
      this._save("at", wish);
      if (this.step.done === "seen") this._done();
      this.draw();
    }

    /** Brings the board back to what it was before the step. */
    leave() {
      if (this.base) this.board.restore(this.base);
      this.base = null;
      this.at = null;
    }

    async _fetch(name) {
      const answer = await fetch(`qe/traces/${name}`);
      if (!answer.ok) throw new Error(String(answer.status));
      const trace = root.QEvictView.readTrace(await answer.text());
      this.traces.set(name, trace);
      return trace;
    }

    _enter(trace) {
      const { board, step } = this;
      board.showTrace(trace);
      board.setRow(step.row);
      board.seekEvent(step.event - (step.arrive ? 1 : 0));
      board.showRegret = step.regret;
      board.highlight(step.marks, step.parts);
      this.guesses = step.marks.map(() => "");
      this.told = null;
      this.sent = "";
      const old = this.store.answers[this.key];
      if (old && step.question.kind === "predict" && old.picks.length === step.marks.length) {
        this.guesses = old.picks.slice();
        board.guess(this.guesses);
      }
      if (step.arrive) board.step(1);
      if (step.play && !board._reduced()) board.play();
    }

    _reached() {
      if (!this.at || this.step.done !== "reached") return;
      if (this.board.index === this.board.trace.steps.length - 1 && this._done()) this.draw();
    }

    _done() {
      if (this.store.done[this.key]) return false;
      this.store.done[this.key] = true;
      this._save("done", this.store.done);
      return true;
    }

    _save(name, value) {
      this.store[name] = value;
      try {
        localStorage.setItem(STORE, JSON.stringify(this.store));
      } catch {
        /* private browsing: the score holds until the page closes */
      }
    }

    next() {
      const [lesson, step] = this.at;
      if (step + 1 < this.lesson.steps.length) this.go(lesson, step + 1);
      else if (lesson + 1 < this.data.lessons.length) this.go(lesson + 1, 0);
    }

    back() {
      const [lesson, step] = this.at;
      if (step > 0) this.go(lesson, step - 1);
      else if (lesson > 0) this.go(lesson - 1, this.data.lessons[lesson - 1].steps.length - 1);
    }

    // ---- questions ----------------------------------------------------------------------------------------------

    _answer(right, asked, picks) {
      if (!this.store.answers[this.key]) {
        this.store.answers[this.key] = { right, asked, picks };
        this._save("answers", this.store.answers);
      }
      this._done();
      this._send(picks);
    }

    choose(i) {
      const { question } = this.step;
      if (!question || question.kind !== "choice" || i >= question.choices.length) return;
      this.told = i;
      this._answer(i === question.answer ? 1 : 0, 1, [i]);
      this.draw(`choice-${i}`);
    }

    guess(i, tier) {
      this.guesses[i] = tier;
      this.board.guess(this.guesses);
      this.draw(this.guesses.every(Boolean) ? "reveal" : `guess-${i}-${tier}`);
    }

    reveal() {
      const { question, marks } = this.step;
      const right = question.answers.filter((tier, i) => tier === this.guesses[i]).length;
      this.told = right;
      this._answer(right, marks.length, this.guesses.slice());
      this.board.pause();
      this.board.seekEvent(this.step.event);
      this.board.step(1);
      this.board.reveal(question.answers);
      this.draw("next");
    }

    forget() {
      this.store.answers = {};
      this._save("done", {});
      this.go(...this.at);
    }

    // ---- keys ---------------------------------------------------------------------------------------------------

    _key(event) {
      if (!this.at || document.querySelector("dialog[open]") || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      if (!this.host.offsetParent || (event.target.closest && event.target.closest(FIELDS) && event.target !== this.board.ui.slider)) return;
      const act = this._action(event.key);
      if (!act) return;
      event.preventDefault();
      event.stopPropagation();
      // From the tab's own button, where arrows choose tabs, to the board, where they choose events.
      if (event.target.getAttribute && event.target.getAttribute("role") === "tab") this.board.host.focus({ preventScroll: true });
      act();
    }

    _action(key) {
      const small = key.length === 1 ? key.toLowerCase() : key;
      const plain = { n: () => this.next(), b: () => this.back(), PageDown: () => this.next(), PageUp: () => this.back() };
      if (Object.hasOwn(plain, small)) return plain[small];
      const { question } = this.step;
      if (!question) return null;
      if (question.kind === "choice" && /^[1-9]$/.test(key) && Number(key) <= question.choices.length) return () => this.choose(Number(key) - 1);
      if (question.kind !== "predict" || this.told !== null) return null;
      const place = this.guesses.indexOf("");
      const tier = { f: "full", q: "quant", e: "evicted" }[small];
      if (tier && place >= 0) return () => this.guess(place, tier);
      if (small === "Backspace" && this.guesses.some(Boolean)) return () => this.guess((place < 0 ? this.guesses.length : place) - 1, "");
      return null;
    }

    // ---- drawing ------------------------------------------------------------------------------------------------

    /** Draws the panel; the element called `focus`, or the one that had it, gets the focus. */
    draw(focus) {
      const { host } = this;
      if (!this.at) return;
      const held = focus || (host.contains(document.activeElement) && document.activeElement.dataset.name);
      host.replaceChildren();
      this._list();
      const part = el("article", "qe-step", host, { "aria-live": "polite" });
      el("p", "qe-step-where", part).textContent = `${this._w("lesson", { n: this.at[0] + 1, all: this.data.lessons.length })} · ${this._w("step", { n: this.at[1] + 1, all: this.lesson.steps.length })}`;
      el("h2", "", part).textContent = this.lesson.title;
      this._words(el("p", "qe-step-say", part, { dir: "auto" }), this.step.told);
      if (this.step.ranks) this._ranks(part);
      if (this.step.table) this._table(part, this.step.table);
      if (this.step.done === "reached" && !this.store.done[this.key]) el("p", "qe-step-note", part).textContent = this._w("play_to_end");
      if (this.step.question) this._question(part);
      for (const source of this.step.sources) el("p", "qe-step-source", part).textContent = `${this._w("source")}: ${source}`;
      this._buttons();
      const node = held && host.querySelector(`[data-name="${held}"]`);
      if (node) node.focus({ preventScroll: true });
      const why = this.told !== null && host.querySelector(".qe-step-why");
      if (why) why.scrollIntoView({ block: "nearest" }); // where the window is too low for all of it
      this._count();
    }

    /** Words in parts, [words, term]: a term opens the glossary. */
    _words(parent, parts) {
      for (const [words, term] of parts) {
        if (term) el("span", "", parent, { "data-term": term }).textContent = words; // breaks between lines as words do
        else parent.append(words);
      }
    }

    _button(parent, name, className, words, act) {
      const node = el("button", className, parent, { type: "button", "data-name": name });
      node.textContent = words;
      node.addEventListener("click", act);
      return node;
    }

    _list() {
      const nav = el("nav", "qe-step-list", this.host, { "aria-label": this._w("list") });
      this.data.lessons.forEach((lesson, i) => {
        const count = lesson.steps.filter((step) => this.store.done[`${lesson.id}.${step.name}`]).length;
        const whole = count === lesson.steps.length;
        const node = this._button(nav, `lesson-${i}`, whole ? "qe-whole" : "", String(i + 1), () => this.go(i, 0));
        node.title = `${i + 1} ${lesson.title}`;
        node.setAttribute("aria-label", `${i + 1} ${lesson.title}, ${this._w("seen_of", { n: count, all: lesson.steps.length })}`);
        if (i === this.at[0]) node.setAttribute("aria-current", "true");
      });
    }

    _ranks(parent) {
      const columns = ["", this._w("rank"), this._w("rank_score"), this._w("rank_tier")];
      const rows = this.step.ranks.map((line) => ({ name: line.label, cells: [line.rank, line.score, this.data.tiers[line.tier] || line.tier] }));
      this._table(parent, { columns: columns.slice(1), rows });
    }

    _table(parent, table) {
      const node = el("table", "qe-step-table", parent);
      const head = el("tr", "", el("thead", "", node));
      el("td", "", head);
      for (const column of table.columns) el("th", "", head, { scope: "col" }).textContent = column;
      const body = el("tbody", "", node);
      for (const row of table.rows) {
        const line = el("tr", "", body);
        el("th", "", line, { scope: "row" }).textContent = row.name;
        for (const cell of row.cells) el("td", "", line).textContent = cell;
      }
    }

    _question(parent) {
      const { question } = this.step;
      const box = el("section", "qe-ask", parent);
      el("h3", "", box).textContent = question.ask;
      if (question.kind === "predict") this._predict(box);
      else this._choices(box);
      const old = this.store.answers[this.key];
      if (this.told === null && old) el("p", "qe-step-note", box).textContent = this._w("answered");
      if (this.told !== null) this._words(el("p", "qe-step-why", box, { dir: "auto" }), question.why);
      if (this.class && this.class.asks) el("div", "qe-class-tally", box);
    }

    _choices(box) {
      const { question } = this.step;
      const list = el("ol", "qe-choices", box);
      question.choices.forEach((choice, i) => {
        const node = this._button(el("li", "", list), `choice-${i}`, "", "", () => this.choose(i));
        el("kbd", "", node).textContent = String(i + 1);
        el("span", "", node, { dir: "auto" }).textContent = choice;
        if (this.told === null) return;
        const right = i === question.answer;
        if (right || i === this.told) {
          node.classList.add(right ? "qe-right" : "qe-wrong");
          el("i", "", node, { "aria-hidden": "true" }).textContent = right ? "✓" : "✗";
        }
        node.setAttribute("aria-pressed", String(i === this.told));
      });
      if (this.told === null) return;
      const good = this.told === question.answer;
      el("p", "qe-verdict", box).textContent = good ? this._w("right") : this._w("wrong", { answer: question.choices[question.answer] });
    }

    _predict(box) {
      const { question, marks } = this.step;
      const over = this.told !== null;
      const legend = el("p", "qe-guess-keys", box, { "aria-hidden": "true" });
      for (const tier of TIERS) {
        const word = el("span", "", legend);
        el("kbd", "", word).textContent = LETTERS[tier];
        word.append(` ${this.data.tiers[tier]}`);
      }
      marks.forEach((mark, i) => {
        const line = el("div", "qe-guess", box, { role: "group", "aria-label": `${mark.label}: ${mark.text}` });
        el("b", "", line).textContent = mark.label;
        el("q", "", line, { dir: "auto", title: mark.text }).textContent = mark.text;
        const part = el("span", "", line);
        for (const tier of TIERS) {
          const node = this._button(part, `guess-${i}-${tier}`, "", LETTERS[tier], () => this.guess(i, this.guesses[i] === tier ? "" : tier));
          node.setAttribute("aria-label", `${mark.label}: ${this.data.tiers[tier]}`);
          node.setAttribute("aria-pressed", String(this.guesses[i] === tier));
          node.disabled = over;
          if (over && question.answers[i] === tier) node.classList.add("qe-right");
          else if (over && this.guesses[i] === tier) node.classList.add("qe-wrong");
        }
        el("i", "", line).textContent = !over ? "" : this.guesses[i] === question.answers[i] ? "✓" : "✗";
      });
      if (over) {
        el("p", "qe-verdict", box).textContent = this._w("prediction", { right: this.told, all: marks.length });
        return;
      }
      const ready = this.guesses.every(Boolean);
      const node = this._button(box, "reveal", "qe-main", this._w("reveal"), () => this.reveal());
      node.disabled = !ready;
      node.title = this._w("predict_hint");
    }

    _buttons() {
      const foot = el("div", "qe-step-foot", this.host);
      const bar = el("div", "", foot);
      const [lesson, step] = this.at;
      const last = step === this.lesson.steps.length - 1;
      const back = this._button(bar, "back", "", this._w("back"), () => this.back());
      back.disabled = !lesson && !step;
      const next = this._button(bar, "next", "qe-main", this._w(last ? "next_lesson" : "next"), () => this.next());
      next.disabled = last && lesson === this.data.lessons.length - 1;
      const live = this._button(bar, "live", "", this._w("live"), () => this.open(this.lesson.id));
      live.title = this._w("live_hint");
      const answers = Object.values(this.store.answers);
      const line = el("p", "qe-step-score", el("div", "qe-step-lines", foot));
      const right = answers.reduce((sum, item) => sum + item.right, 0);
      const asked = answers.reduce((sum, item) => sum + item.asked, 0);
      el("span", "", line).textContent = asked ? this._w("score", { right, asked }) : this._w("no_score");
      if (asked) this._button(line, "forget", "qe-plain", this._w("forget"), () => this.forget());
      this._classPart(line.parentNode);
      el("p", "qe-step-keys", foot).textContent = this._w("keys");
    }
  }

  Object.assign(QEvictLessons, { TIERS, LETTERS });
  root.QEvictLessons = QEvictLessons;

  /** Waits for the board called `props.board`, fetches what it needs for lessons, and shows them in `element`. */
  root.qeStartLessons = async (element, props, open) => {
    const found = () => root.qeBoards && root.qeBoards.get(props.board);
    while (!found()) await new Promise((done) => setTimeout(done, WAIT));
    for (const src of props.src.slice(1)) {
      await new Promise((onload, onerror) => document.head.append(Object.assign(document.createElement("script"), { src, onload, onerror })));
    }
    el = root.QEvictView.parts.el;
    root.qeLessons = new QEvictLessons(element.querySelector(".qe-player"), found(), open);
    root.qeLessons.read();
  };
})(window);

/* What QEvictCompare draws where every system goes its own way: how far its text is FullKV's, where it first differs,
 * and what it says in a window of its own. Differences are a flag and a dash, never a colour alone. */
(function (root) {
  "use strict";

  Object.assign(root.QEvictCompare.prototype, {
    /** The first new token at which any system leaves FullKV's text, null if none does. */
    _firstDifference() {
      const known = this.data.systems.map((system) => system.first_difference).filter((at) => at !== null);
      return known.length ? Math.min(...known) : null;
    },

    /** Puts the transport on the first look at which a text differs. */
    _toFirst() {
      const first = this.free ? this._firstDifference() : null;
      if (first === null) return;
      const at = this.looks.findIndex((look) => look.t > this.data.prompt_tokens + first);
      this.seek(at < 0 ? Infinity : at);
    },

    /** New tokens of a system that the shown look knows. */
    _said(system) {
      if (this.index >= this.looks.length - 1) return system.pieces.length;
      return Math.min(system.pieces.length, this.looks[this.index].t - this.data.prompt_tokens + 1);
    },

    /** A line over a system's new tokens: whole while they are FullKV's, dashed after; a flag where they part. */
    _ownText(ctx, system, height) {
      const { axis, colors, data, klHeight } = this;
      const said = this._said(system);
      const first = system.first_difference === null ? said : Math.min(said, system.first_difference);
      const clip = (x) => Math.max(axis.start, Math.min(axis.right, x));
      const place = (token) => Math.round(clip(axis.token(data.prompt_tokens + token)));
      const y = Math.round(klHeight * 0.62);
      ctx.fillStyle = colors.muted;
      ctx.fillRect(place(0), y, Math.max(0, place(first) - place(0)), 4);
      if (first >= said) return;
      ctx.fillStyle = colors.alarm;
      for (let x = place(first); x < place(said); x += 7) ctx.fillRect(x, y, Math.min(4, place(said) - x), 4);
      const x = axis.token(data.prompt_tokens + first);
      if (x < axis.start || x >= axis.right) return;
      ctx.globalAlpha = 0.55;
      ctx.fillRect(Math.round(x), 0, 1, height);
      ctx.globalAlpha = 1;
      this._flag(ctx, x, 1, Math.min(9, y - 3));
    },

    /** A small flag whose staff stands at x. */
    _flag(ctx, x, top, size) {
      const at = Math.round(x);
      ctx.fillRect(at, top, 1.5, size + 4);
      ctx.beginPath();
      ctx.moveTo(at, top);
      ctx.lineTo(at + size * 1.2, top + size / 2);
      ctx.lineTo(at, top + size);
      ctx.fill();
    },

    /** How far a system's text is FullKV's, at the shown look. */
    _ownWords(system) {
      const first = system.first_difference;
      if (first === null || first >= this._said(system)) return this._t("compare.same_so_far");
      return this._t("compare.text_from", { n: first + 1 });
    },

    /** What a system has at columns from..to, prompt included. */
    _textOf(system, from, to) {
      const { pieces, prompt_tokens: prompt } = this.data;
      const own = this.free ? system.pieces : pieces.slice(prompt);
      return [...pieces.slice(0, prompt).slice(from, to), ...own.slice(Math.max(0, from - prompt), Math.max(0, to - prompt))].join("");
    },
  });
})(window);

/* Painter of curves: a figure over the events of a run. */
(function (root) {
  "use strict";

  function hatch(ctx, x, width, height, color) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, 0, width, height);
    ctx.clip();
    ctx.strokeStyle = color;
    ctx.lineWidth = 1;
    ctx.globalAlpha = 0.55;
    ctx.beginPath();
    for (let at = x - height; at < x + width; at += 6) {
      ctx.moveTo(at, height);
      ctx.lineTo(at + height, 0);
    }
    ctx.stroke();
    ctx.restore();
  }

  /** A curve over events. `points`: [{i, v}]; `under`: a second, dashed one; hatched from `pending` to `now`. */
  function curve(ctx, s) {
    const { width, height, points, under, count, now, pending, color, colors } = s;
    ctx.clearRect(0, 0, width, height);
    const pad = 4;
    const x = (i) => pad + (i / Math.max(1, count)) * (width - 2 * pad);
    const top = s.top || 1;
    const y = (v) => height - pad - (Math.min(v, top) / top) * (height - 2 * pad - 2);
    ctx.fillStyle = colors.line;
    ctx.fillRect(0, height - 1, width, 1);
    if (pending !== null && now > pending) hatch(ctx, x(pending), Math.max(2, x(now) - x(pending)), height - 1, colors.muted);
    const trace = (list, dash, widthOfLine, until) => {
      ctx.setLineDash(dash);
      ctx.lineWidth = widthOfLine;
      ctx.lineJoin = "round";
      ctx.beginPath();
      let started = false;
      for (const point of list) {
        if (point.v === null || (until ? point.i > now : point.i < now)) continue;
        if (started) ctx.lineTo(x(point.i), y(point.v));
        else ctx.moveTo(x(point.i), y(point.v));
        started = true;
      }
      ctx.stroke();
      ctx.setLineDash([]);
    };
    ctx.strokeStyle = color;
    if (under) trace(under, [3, 3], 1.25, true);
    trace(points, [], 2.25, true);
    ctx.globalAlpha = 0.25;
    trace(points, [], 2.25, false);
    ctx.globalAlpha = 1;
    ctx.fillStyle = colors.muted;
    ctx.fillRect(Math.round(x(now)), 0, 1, height - 1);
    const shown = s.shown;
    if (shown) {
      ctx.fillStyle = color;
      ctx.beginPath();
      ctx.arc(x(shown.i), y(shown.v), 3.5, 0, 7);
      ctx.fill();
    }
  }

  Object.assign(root.QEvictDraw, { curve });
})(window);

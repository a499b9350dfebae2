// The memory timeline of one report: uPlot draws axes, bands and cursor, and we draw on its canvas
// what it has no word for: phases, limit, peak, single buffers, what is highlighted.

const AXIS_WIDTH = 72, AXIS_HEIGHT = 28;
const LEAST_PIXELS = 0.5; // a buffer thinner than that is part of the grey below

class Timeline {
  // `app` has the state that all parts share: mode, picked buffers, range; it is told what happens.
  constructor(report, app) {
    this.report = report;
    this.app = app;
    this.from = 0;
    this.to = report.operations - 1;
    this.operation = null;
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    this.host = element("div", {
      class: "timeline", tabindex: 0, role: "application", "aria-roledescription": "memory timeline",
      "aria-label": `Live bytes over ${plural(report.operations, "operation")}, ${report.label}. `
        + "Left and right arrows move along the step, with Shift they select a range, up and down go "
        + "through what is live there, Enter picks it, P goes to the peak, plus and minus zoom, "
        + "Escape clears.",
    });
    this.host.append(this.tooltip);
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.host.addEventListener("mouseleave", () => { this.tooltip.hidden = true; });
    this.host.addEventListener("blur", () => { this.tooltip.hidden = true; });
  }

  // Makes it anew: for another mode, size, theme, zoom.
  draw() {
    const width = Math.max(200, this.host.clientWidth), height = this.app.chartHeight();
    const plotted = width - AXIS_WIDTH;
    this.columns = columnsOf(this.report, this.from, this.to, plotted);
    this.bands = grouping(this.report, this.app.reports, this.app.mode).bands;
    this.rectangles = null;
    const [data, series] = this.series();
    const faint = color("faint"), grid = { stroke: color("grid"), width: 1 };
    const options = {
      width, height, series, legend: { show: false }, padding: [22, 24, 0, 0],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false },
      },
      scales: {
        x: { time: false, range: () => [this.from, this.to + 1] },
        y: { range: () => [0, this.app.top()] },
      },
      axes: [
        { stroke: faint, grid: { show: false }, ticks: grid, size: AXIS_HEIGHT, font: font(11),
          label: "operation", labelSize: 16, labelGap: 0, labelFont: font(11),
          values: (plot, at) => at.map((n) => (Number.isInteger(n) && n <= this.to ? formatCount(n + 1) : "")) },
        { stroke: faint, grid, ticks: grid, size: AXIS_WIDTH, font: font(11), splits: byteSplits,
          values: (plot, at) => at.map(axisBytes) },
      ],
      hooks: {
        draw: [(plot) => this.paint(plot)],
        setCursor: [(plot) => this.moved(plot)],
        setSelect: [(plot) => this.brushed(plot)],
      },
    };
    this.plot?.destroy();
    this.plot = new uPlot(options, data, this.host);
    this.plot.batch(() => {}); // lay it out now, not in a microtask: positions are asked for next
    this.plot.over.addEventListener("click", () => this.clicked());
    this.plot.over.addEventListener("dblclick", () => this.zoom(0, this.report.operations - 1));
    this.showRange();
  }

  // Cumulated bands, the whole first: each is painted over the one before it.
  series() {
    const { operations, edges } = this.columns, length = operations.length;
    const data = [Array.from(edges)], series = [{}];
    const single = this.app.mode === "buffers";
    const shown = single ? [] : this.bands;
    const paths = uPlot.paths.stepped({ align: 1 });
    const push = (values, fill) => {
      data.push([...values, values[length - 1]]);
      series.push({ paths, fill, stroke: color("surface"), width: single ? 0 : 1, points: { show: false } });
    };
    const below = new Float64Array(length);
    const layers = shown.map((band) => {
      for (let column = 0; column < length; column++) below[column] += band.sum[operations[column]];
      const dim = this.app.band !== undefined && this.app.band !== band.name;
      return [below.slice(), color(band.color) + (dim ? "40" : "")];
    });
    if (single) push(Array.from(operations, (op) => this.report.total[op]), color("small"));
    for (const [values, fill] of layers.reverse()) push(values, fill);
    return [data, series];
  }

  columnAt(value) {
    const { edges } = this.columns;
    let low = 0, high = edges.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (edges[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  paint(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 22 * devicePixelRatio, bbox.width, bbox.height + 22 * devicePixelRatio);
    ctx.clip();
    if (this.app.mode === "buffers") this.paintBuffers(plot);
    else this.paintNames(plot);
    this.paintPicked(plot);
    paintPhases(plot, this.report, this.from, this.to);
    paintLimits(plot, this.report, this.app.top());
    ctx.restore();
  }

  paintBuffers(plot) {
    const { ctx } = plot, { edges } = this.columns, { picked } = this.app, pixel = devicePixelRatio;
    const { bands, bandOfKind } = grouping(this.report, this.app.reports, "buffers");
    const colors = bands.map((band) => color(band.color)), surface = color("surface");
    const least = LEAST_PIXELS * this.app.top() / (plot.bbox.height / pixel);
    this.rectangles ??= rectangles(this.report, this.columns, bandOfKind, least);
    for (const { buffer, band, bytes, from, to, base } of this.rectangles) {
      const faded = picked.size ? !picked.has(buffer) : this.app.band !== undefined && bands[band].name !== this.app.band;
      const box = boxOf(plot, edges[from], edges[to], base, base + bytes);
      ctx.globalAlpha = faded ? 0.25 : 1;
      ctx.fillStyle = colors[band];
      ctx.fillRect(box.x, box.y, box.width, box.height);
      if (buffer < 0) continue;
      // A line between it and the next one; at the sides there is none, since a buffer that sinks
      // is several rectangles.
      if (box.height > 3 * pixel) {
        ctx.fillStyle = surface;
        ctx.fillRect(box.x, box.y, box.width, pixel);
      }
      if (box.height > 15 * pixel && box.width > 80 * pixel) {
        boxText(ctx, box, `${this.report.kinds[this.report.kind[buffer]].name} ${formatBytes(bytes)}`, surface);
      }
    }
    ctx.globalAlpha = 1;
  }

  // The name of each band where it is thickest, if there is room: colour is not all that tells.
  paintNames(plot) {
    const { ctx } = plot, { operations, edges } = this.columns, surface = color("surface");
    const below = new Float64Array(operations.length);
    const height = 15 * this.app.top() / (plot.bbox.height / devicePixelRatio);
    for (const band of this.bands) {
      let thickest = 0;
      operations.forEach((op, column) => {
        if (band.sum[op] > band.sum[operations[thickest]]) thickest = column;
      });
      const middle = below[thickest] + band.sum[operations[thickest]] / 2;
      const base = middle - height / 2, top = middle + height / 2;
      const holds = (column) => below[column] <= base && below[column] + band.sum[operations[column]] >= top;
      let from = thickest, to = thickest;
      while (from > 0 && holds(from - 1)) from--;
      while (to < operations.length - 1 && holds(to + 1)) to++;
      if (holds(thickest)) boxText(ctx, boxOf(plot, edges[from], edges[to + 1], base, top), band.label, surface, "center");
      operations.forEach((op, column) => { below[column] += band.sum[op]; });
    }
  }

  // In bands, what is picked is drawn from the ground up, with its sum at each operation.
  paintPicked(plot) {
    const { picked, mode } = this.app;
    if (!picked.size || this.app.report !== this.report) return;
    // Buffer by buffer, what is drawn for itself is seen already.
    const buffers = mode === "buffers" ? [...picked].filter((i) => i >= this.report.count) : [...picked];
    if (!buffers.length) return;
    const { ctx } = plot, { operations, edges } = this.columns;
    const sum = liveSum(this.report, buffers.length, (i) => buffers[i]);
    ctx.fillStyle = hatched(ctx);
    ctx.strokeStyle = color("text");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    operations.forEach((op, column) => {
      if (!sum[op]) return;
      const box = boxOf(plot, edges[column], edges[column + 1], 0, sum[op]);
      ctx.fillRect(box.x, box.y, box.width, box.height);
    });
    ctx.beginPath();
    operations.forEach((op, column) => {
      const y = plot.valToPos(sum[op], "y", true);
      ctx[column ? "lineTo" : "moveTo"](plot.valToPos(edges[column], "x", true), y);
      ctx.lineTo(plot.valToPos(edges[column + 1], "x", true), y);
    });
    ctx.stroke();
  }

  moved(plot) {
    const { left, top } = plot.cursor;
    if (left === undefined || left < 0) return;
    const column = this.columnAt(plot.posToVal(left, "x"));
    this.operation = this.columns.operations[column];
    if (this.byKey) return;
    this.item = this.itemAt(this.operation, plot.posToVal(top, "y"));
    this.showTooltip(left, top);
  }

  // What is drawn at some bytes above the ground: a band, or a buffer; null above everything.
  itemAt(operation, bytes) {
    let base = 0;
    for (const item of this.stack(operation)) {
      base += item.bytes;
      if (bytes < base) return item;
    }
    return null;
  }

  stack(operation) {
    if (this.app.mode === "buffers") {
      return liveAt(this.report, operation).map((buffer) => ({ buffer, bytes: this.report.bytes[buffer] }));
    }
    return this.bands.map((band) => ({ band, bytes: band.sum[operation] })).filter((item) => item.bytes > 0);
  }

  describe(item) {
    if (!item) return "";
    if (item.band) return `${item.band.label} ${formatBytes(item.bytes)}`;
    const kind = this.report.kinds[this.report.kind[item.buffer]];
    return `${kind.name} ${kind.type} ${formatBytes(item.bytes)}`;
  }

  showTooltip(left, top) {
    const { report, operation, item } = this, phase = phaseOf(report, operation);
    const lines = [element("div", { class: "faint" },
      `operation ${formatCount(operation + 1)}${phase && `, ${phase}`}: ${formatBytes(report.total[operation])}`)];
    if (item) lines.unshift(element("strong", {}, isolated(this.describe(item))));
    for (const buffer of this.largest(item, operation)) {
      const kind = report.kinds[report.kind[buffer]];
      const where = kind.source || kind.path;
      lines.push(element("div", {}, isolated(`${formatBytes(report.bytes[buffer])}  ${kind.name}  ${kind.type}`),
        where && where !== kind.name ? element("div", { class: "faint" }, isolated(where)) : null));
    }
    if (item?.buffer !== undefined) lines.push(...this.about(item.buffer));
    this.tooltip.replaceChildren(...lines);
    this.tooltip.hidden = false;
    const room = this.host.clientWidth, x = left + AXIS_WIDTH;
    const flip = x + this.tooltip.offsetWidth + 24 > room;
    this.tooltip.style.left = `${Math.max(0, flip ? x - this.tooltip.offsetWidth - 16 : x + 16)}px`;
    this.tooltip.style.top = `${Math.max(0, top - 10)}px`;
  }

  about(buffer) {
    const { report } = this, kind = report.kinds[report.kind[buffer]];
    const lines = [`live from operation ${formatCount(report.start[buffer] + 1)} to ${formatCount(report.end[buffer] + 1)}`,
      kind.module, kind.source, kind.path === kind.name ? "" : kind.path];
    return lines.filter(Boolean).map((text) => element("div", { class: "faint" }, isolated(text)));
  }

  largest(item, operation) {
    if (!item?.band || item.band.extra) return [];
    const { bandOfKind } = grouping(this.report, this.app.reports, this.app.mode), at = this.bands.indexOf(item.band);
    return liveAt(this.report, operation)
      .filter((buffer) => bandOfKind[this.report.kind[buffer]] === at)
      .sort((a, b) => this.report.bytes[b] - this.report.bytes[a]).slice(0, 3);
  }

  clicked() {
    if (this.dragged) {
      this.dragged = false;
      return;
    }
    this.pick();
  }

  pick() {
    if (!this.item) this.app.clear(this.report);
    else if (this.item.band) this.app.pickBand(this.report, this.item.band, this.operation);
    else this.app.pickBuffers(this.report, [this.item.buffer], true);
  }

  brushed(plot) {
    const { left, width } = plot.select;
    if (width < 2) return;
    this.dragged = true;
    setTimeout(() => { this.dragged = false; }, 50);
    const first = this.columnAt(plot.posToVal(left, "x")), last = this.columnAt(plot.posToVal(left + width, "x"));
    const from = this.columns.edges[first], to = this.columns.edges[last + 1] - 1;
    // Later: selecting may make the plot anew, and uPlot is not done with this one.
    queueMicrotask(() => this.app.select(this.report, from, to));
  }

  // The selected range as a tint; uPlot's own selection, set from the state.
  showRange() {
    const { range } = this.app, mine = range && this.app.report === this.report;
    // What fills the view, once zoomed to, needs no tint.
    const here = mine && (range[0] > this.from || range[1] < this.to);
    const at = (value) => this.plot.valToPos(Math.min(Math.max(value, this.from), this.to + 1), "x");
    const left = here ? at(range[0]) : 0, right = here ? at(range[1] + 1) : 0;
    const height = this.plot.over.clientHeight;
    this.plot.setSelect({ left, top: 0, width: here ? Math.max(2, right - left) : 0, height: here ? height : 0 }, false);
  }

  zoom(from, to) {
    const whole = this.report.operations - 1;
    this.from = Math.max(0, Math.min(from, whole));
    this.to = Math.max(this.from, Math.min(to, whole));
    this.draw();
  }

  zoomBy(factor) {
    const middle = this.operation ?? this.report.peak_index, width = (this.to - this.from + 1) * factor;
    const from = Math.round(middle - ((middle - this.from) / (this.to - this.from + 1)) * width);
    this.zoom(Math.max(0, from), Math.max(0, from) + Math.max(1, Math.round(width)) - 1);
  }

  // Moves the cursor to an operation, as the mouse would.
  goTo(operation, item = null) {
    const target = Math.max(0, Math.min(operation, this.report.operations - 1));
    if (target < this.from || target > this.to) {
      const width = this.to - this.from;
      this.zoom(Math.max(0, target - Math.floor(width / 2)), Math.max(0, target - Math.floor(width / 2)) + width);
    }
    const { edges } = this.columns, column = this.columnAt(target);
    const left = this.plot.valToPos((edges[column] + edges[column + 1]) / 2, "x");
    this.item = item;
    let base = 0;
    for (const each of this.stack(target)) {
      if (item && this.same(each, item)) { base += each.bytes / 2; break; }
      base += each.bytes;
    }
    const top = this.plot.valToPos(base, "y");
    this.byKey = true;
    this.plot.setCursor({ left, top });
    this.byKey = false;
    this.operation = target;
    this.showTooltip(left, top);
    const phase = phaseOf(this.report, target);
    announce(`operation ${formatCount(target + 1)}${phase && `, ${phase}`}, `
      + `${formatBytes(this.report.total[target])}${item ? `: ${this.describe(item)}` : ""}`);
  }

  same(one, other) {
    return one.band ? one.band === other.band : one.buffer === other.buffer;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.host) return;
    const here = this.operation ?? this.report.peak_index;
    const column = this.columnAt(here), { edges, operations } = this.columns;
    const large = Math.max(1, Math.round(operations.length / 10));
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: large, PageUp: -large };
    const stack = this.stack(here);
    const level = this.item ? stack.findIndex((item) => this.same(item, this.item)) : -1;
    if (event.key in steps) {
      // From one column to the next: an operation each, or where a pixel has many, a stretch.
      const next = column + steps[event.key];
      const target = next < 0 ? edges[0] - 1 : next >= operations.length ? this.to + 1 : operations[next];
      if (event.shiftKey) this.extend(here, Math.max(0, Math.min(target, this.report.operations - 1)));
      this.goTo(target);
    } else if (event.key === "Home") this.goTo(this.from);
    else if (event.key === "End") this.goTo(this.to);
    else if (event.key === "ArrowUp" && stack.length) this.goTo(here, stack[Math.min(level + 1, stack.length - 1)]);
    else if (event.key === "ArrowDown" && stack.length) this.goTo(here, stack[Math.max(level - 1, 0)]);
    else if (event.key === "Enter" || event.key === " ") this.pick();
    else if (event.key === "p" || event.key === "P") this.goTo(this.report.peak_index);
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else if (event.key === "0") this.zoom(0, this.report.operations - 1);
    else if (event.key === "Escape") this.app.clear(this.report);
    else return;
    event.preventDefault();
  }

  extend(here, target) {
    const known = this.app.report === this.report ? this.app.range : null;
    this.anchor = known && this.anchor !== undefined ? this.anchor : here;
    this.app.select(this.report, Math.min(this.anchor, target), Math.max(this.anchor, target));
  }
}

const font = (size) => `${size}px system-ui, sans-serif`;

function boxOf(plot, x0, x1, y0, y1) {
  const x = plot.valToPos(x0, "x", true), y = plot.valToPos(y1, "y", true);
  return { x, y, width: plot.valToPos(x1, "x", true) - x, height: plot.valToPos(y0, "y", true) - y };
}

// Text inside a box, cut where it does not fit, and left out where little of it would.
function boxText(ctx, box, text, fill, align = "left") {
  const pixel = devicePixelRatio, room = box.width - 10 * pixel;
  ctx.save();
  ctx.font = `600 ${11 * pixel}px system-ui, sans-serif`;
  let shown = text.slice(0, 80);
  while (shown && ctx.measureText(shown === text ? text : `${shown}…`).width > room) shown = shown.slice(0, -1);
  if (shown === text || shown.length >= 8) {
    ctx.fillStyle = fill;
    ctx.textAlign = align;
    ctx.textBaseline = "middle";
    const x = align === "center" ? box.x + box.width / 2 : box.x + 5 * pixel;
    ctx.fillText(shown === text ? text : `${shown}…`, x, box.y + box.height / 2);
  }
  ctx.restore();
}

function hatched(ctx) {
  const size = 6 * devicePixelRatio, tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const brush = tile.getContext("2d");
  brush.strokeStyle = color("text");
  brush.lineWidth = devicePixelRatio;
  brush.beginPath();
  brush.moveTo(0, size);
  brush.lineTo(size, 0);
  brush.stroke();
  return ctx.createPattern(tile, "repeat");
}

function line(ctx, x0, y0, x1, y1, stroke, dash, width = 1) {
  ctx.save();
  ctx.strokeStyle = stroke;
  ctx.lineWidth = width * devicePixelRatio;
  ctx.setLineDash(dash.map((n) => n * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
  ctx.restore();
}

// Text on a ground of its own, readable over any band.
function tag(ctx, text, x, y, align, ink) {
  const pixel = devicePixelRatio, pad = 4 * pixel, height = 16 * pixel;
  ctx.save();
  ctx.font = `600 ${11 * pixel}px system-ui, sans-serif`;
  const width = ctx.measureText(text).width + 2 * pad;
  const left = align === "right" ? x - width : align === "center" ? x - width / 2 : x;
  ctx.globalAlpha = 0.88;
  ctx.fillStyle = color("surface");
  ctx.fillRect(left, y, width, height);
  ctx.globalAlpha = 1;
  ctx.fillStyle = ink;
  ctx.textAlign = "left"; // uPlot leaves the alignment of its last axis
  ctx.textBaseline = "middle";
  ctx.fillText(text, left + pad, y + height / 2);
  ctx.restore();
}

function paintPhases(plot, report, from, to) {
  const { ctx, bbox } = plot, ends = [...report.phases.slice(1).map(([, start]) => start), report.operations];
  const pixel = devicePixelRatio;
  let free = bbox.left; // where the name before ends
  report.phases.forEach(([name, start], i) => {
    if (start > to || ends[i] <= from) return;
    const x = plot.valToPos(Math.max(start, from), "x", true), end = plot.valToPos(Math.min(ends[i], to + 1), "x", true);
    if (start > from) line(ctx, x, bbox.top - 18 * devicePixelRatio, x, bbox.top + bbox.height, color("text"), [3, 3]);
    ctx.save();
    ctx.font = font(12 * pixel);
    ctx.fillStyle = color("faint");
    ctx.textBaseline = "middle";
    // The name of a phase that is too narrow for it stands before it, where there is room.
    const pointing = `${name} ▸`, room = ctx.measureText(pointing).width + 10 * pixel;
    const before = ctx.measureText(name).width + 5 * pixel > end - x && x - free > room;
    ctx.textAlign = before ? "right" : "left";
    ctx.beginPath();
    ctx.rect(before ? x - room : x, bbox.top - 22 * pixel, before ? room : end - x, 20 * pixel);
    ctx.clip();
    ctx.fillText(before ? pointing : name, before ? x - 5 * pixel : x + 5 * pixel, bbox.top - 11 * pixel);
    free = before ? x : Math.min(end, x + ctx.measureText(name).width + 10 * pixel);
    ctx.restore();
  });
}

// The limit, the compiler's figure where it is another than the peak, and the peak.
function paintLimits(plot, report, top) {
  const { ctx, bbox } = plot, pixel = devicePixelRatio, right = bbox.left + bbox.width;
  const y = (bytes) => plot.valToPos(bytes, "y", true);
  const { limit, compiled, peak, peak_index: at } = report;
  if (limit.bytes > 0 && limit.bytes <= top) {
    line(ctx, bbox.left, y(limit.bytes), right, y(limit.bytes), color("limit"), [7, 4], 2);
    tag(ctx, `${limit.name} ${formatBytes(limit.bytes)}`, right - 4 * pixel, y(limit.bytes) - 18 * pixel, "right", color("limit"));
  }
  if (compiled <= top && Math.abs(compiled - peak) > 0.02 * top) {
    line(ctx, bbox.left, y(compiled), right, y(compiled), color("text"), [2, 3]);
    tag(ctx, `compiler's peak ${formatBytes(compiled)}`, bbox.left + 4 * pixel, y(compiled) + 2 * pixel, "left", color("text"));
  }
  const x = plot.valToPos(at + 0.5, "x", true);
  if (x < bbox.left || x > right) return;
  line(ctx, bbox.left, y(peak), right, y(peak), color("text"), [1, 3]);
  // A peak of one operation of hundreds is narrower than a pixel: the stem shows where it stands.
  line(ctx, x, y(peak), x, bbox.top + bbox.height, color("text"), []);
  ctx.beginPath();
  ctx.arc(x, y(peak), 4.5 * pixel, 0, 7);
  ctx.fillStyle = color("text");
  ctx.fill();
  const align = x < bbox.left + bbox.width / 2 ? "left" : "right";
  const above = Math.max(bbox.top - 2 * pixel, y(peak) - 20 * pixel);
  tag(ctx, `peak ${formatBytes(peak)}`, x + (align === "left" ? 7 : -7) * pixel, above, align, color("text"));
}

const axisBytes = (bytes) => (bytes ? formatBytes(bytes).replace(/\.0(?=\D)/, "") : "0");

// Round numbers of the unit that the largest value is in.
function byteSplits(plot, axis, least, most) {
  const [, unit] = UNITS.find(([, size]) => most >= size) ?? ["B", 1];
  const rough = most / unit / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power * unit).find((n) => n >= rough * unit);
  const found = [];
  for (let value = 0; value <= most; value += step) found.push(value);
  return found;
}

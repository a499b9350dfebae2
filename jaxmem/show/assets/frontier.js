// Seconds of a step against peak bytes: the frontier as steps, stock policies as points.

class FrontierChart {
  constructor(data, host) {
    this.data = data;
    this.host = host;
    const known = (points) => points.filter((point) => point.seconds !== null);
    this.points = known(data.points);
    this.stock = known(data.stock);
    this.all = [...this.points.map((point) => ({ ...point, best: true })), ...this.stock]
      .sort((a, b) => a.bytes - b.bytes || a.seconds - b.seconds);
    this.at = -1;
    this.tooltip = element("div", { class: "tooltip", hidden: true });
    host.tabIndex = 0;
    host.setAttribute("role", "application");
    host.setAttribute("aria-label", `Seconds of a step against ${data.figure} peak bytes. Left and right arrows go from point to point.`);
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("blur", () => { this.tooltip.hidden = true; });
    host.addEventListener("mouseleave", () => { this.tooltip.hidden = true; });
  }

  draw() {
    if (!this.all.length) return;
    const width = Math.max(200, this.host.clientWidth), faint = color("faint");
    const grid = { stroke: color("grid"), width: 1 }, xs = this.points.map((point) => point.bytes);
    const options = {
      width, height: 300, legend: { show: false }, padding: [16, 24, 0, 0],
      cursor: { points: { show: false }, drag: { x: false, y: false } },
      scales: { x: { time: false, range: () => this.reach("bytes") }, y: { range: () => this.reach("seconds") } },
      axes: [
        { stroke: faint, grid, ticks: grid, size: AXIS_HEIGHT, font: font(11), splits: (plot, axis, least, most) => byteSplits(plot, axis, least, most).filter((n) => n >= least),
          values: (plot, at) => at.map(axisBytes) },
        { stroke: faint, grid, ticks: grid, size: AXIS_WIDTH, font: font(11), values: (plot, at) => at.map(formatSeconds) },
      ],
      series: [{}, { paths: uPlot.paths.stepped({ align: 1 }), stroke: color("p0"), width: 2, points: { show: true, size: 6, fill: color("p0") } }],
      hooks: { draw: [(plot) => this.paint(plot)], setCursor: [(plot) => this.moved(plot)] },
    };
    this.plot?.destroy();
    this.host.replaceChildren(this.tooltip);
    this.plot = new uPlot(options, [xs, this.points.map((point) => point.seconds)], this.host);
  }

  reach(field) {
    const values = this.all.map((point) => point[field]);
    const least = Math.min(...values), most = Math.max(...values), pad = (most - least || most || 1) * 0.08;
    const { budget } = this.data, with_budget = field === "bytes" && budget && budget < 2 * most;
    return [Math.max(0, Math.min(least, with_budget ? budget : least) - pad), Math.max(most, with_budget ? budget : most) + pad];
  }

  paint(plot) {
    const { ctx, bbox } = plot, pixel = devicePixelRatio, x = (n) => plot.valToPos(n, "x", true), y = (n) => plot.valToPos(n, "y", true);
    for (const [name, bytes] of [["budget", this.data.budget], ["device", this.data.device]]) {
      if (!bytes || bytes > this.reach("bytes")[1]) continue;
      line(ctx, x(bytes), bbox.top, x(bytes), bbox.top + bbox.height, color("limit"), [7, 4], 2);
      tag(ctx, `${name} ${formatBytes(bytes)}`, x(bytes) + 4 * pixel, bbox.top, "left", color("limit"));
    }
    const taken = [];
    for (const point of this.stock) {
      const size = 4.5 * pixel, px = x(point.bytes), py = y(point.seconds);
      ctx.fillStyle = color("p1");
      ctx.beginPath();
      ctx.moveTo(px, py - size);
      ctx.lineTo(px + size, py);
      ctx.lineTo(px, py + size);
      ctx.lineTo(px - size, py);
      ctx.fill();
      ctx.font = `${11 * pixel}px system-ui, sans-serif`;
      const wide = ctx.measureText(point.name).width, left = px + wide + 8 * pixel > bbox.left + bbox.width;
      const middle = Math.max(bbox.top + 7 * pixel, py - 10 * pixel); // above the line, which leaves its points sideways
      const box = { x: left ? px - wide - 8 * pixel : px + 8 * pixel, y: middle - 7 * pixel, width: wide, height: 14 * pixel };
      // A name that would lie on another is left to the tooltip and the table.
      if (taken.some((other) => overlap(other, box))) continue;
      taken.push(box);
      ctx.fillStyle = color("text");
      ctx.textAlign = "left";
      ctx.textBaseline = "middle";
      ctx.strokeStyle = color("surface");
      ctx.lineWidth = 3 * pixel;
      ctx.strokeText(point.name, box.x, middle);
      ctx.fillText(point.name, box.x, middle);
    }
    if (this.at >= 0) {
      const point = this.all[this.at];
      ctx.strokeStyle = color("text");
      ctx.lineWidth = 2 * pixel;
      ctx.beginPath();
      ctx.arc(x(point.bytes), y(point.seconds), 8 * pixel, 0, 7);
      ctx.stroke();
    }
  }

  moved(plot) {
    const { left, top } = plot.cursor;
    if (left === undefined || left < 0 || this.byKey) return;
    let best = -1, least = 30;
    this.all.forEach((point, i) => {
      const far = Math.hypot(plot.valToPos(point.bytes, "x") - left, plot.valToPos(point.seconds, "y") - top);
      if (far < least) [best, least] = [i, far];
    });
    if (best !== this.at) this.show(best);
  }

  show(index) {
    this.at = index;
    this.plot.redraw(false);
    this.tooltip.hidden = index < 0;
    if (index < 0) return;
    const point = this.all[index];
    const text = `${formatBytes(point.bytes)}, ${formatSeconds(point.seconds)} a step`;
    this.tooltip.replaceChildren(element("strong", {}, text), element("div", { class: "faint" }, isolated(point.best ? `frontier: ${point.name}` : point.name)),
      ...(point.problem ? [element("div", {}, isolated(point.problem))] : []));
    const x = this.plot.valToPos(point.bytes, "x") + AXIS_WIDTH;
    this.tooltip.style.left = `${Math.max(0, Math.min(x + 14, this.host.clientWidth - this.tooltip.offsetWidth))}px`;
    this.tooltip.style.top = `${Math.max(0, this.plot.valToPos(point.seconds, "y") - 12)}px`;
    announce(`${point.best ? "frontier" : point.name}: ${text}`);
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.plot) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(this.at + step, this.all.length - 1)));
  }
}

const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

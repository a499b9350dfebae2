// Reads the data, makes the page, and holds the state that its parts share.

const live = element("div", { class: "unseen", "aria-live": "polite" });
const announce = (text) => { live.textContent = text; };

const SCOPES = [["peak", "At the peak"], ["range", "Selection"], ["step", "Whole step"]];

class App {
  constructor(data) {
    this.reports = data.reports.map((raw) => decodeReport(raw, data.kind_fields));
    // What the page is about is the last: the plan, where there is one.
    this.report = this.reports.at(-1);
    this.mode = "category";
    this.band = undefined;
    this.range = null;
    this.picked = new Set();
    this.query = "";
    this.scope = "peak";
    this.together = true;
    this.timelines = this.reports.map((report) => new Timeline(report, this));
    this.table = new BufferTable(this);
    this.aside = element("aside", {});
    this.count = element("p", { class: "count", "aria-live": "polite" });
  }

  chartHeight() {
    return Math.max(240, Math.min(380, Math.round(innerHeight * 0.38)));
  }

  // One scale for all charts of the page, so that heights compare.
  top() {
    const most = Math.max(1, ...this.reports.map((report) => peakOf(report.total)), ...this.reports.map((report) => report.peak));
    const lines = this.reports.flatMap((report) => [report.limit.bytes, report.compiled]);
    return 1.1 * Math.max(most, ...lines.filter((bytes) => bytes <= 2.2 * most));
  }

  build(host) {
    const modes = choice("Stack by", Object.entries(MODES).map(([id, { label }]) => [id, label]), this.mode,
      (mode) => { this.mode = mode; this.band = undefined; this.update(); });
    const zoom = element("button", { type: "button", onclick: () => this.zoomToRange() }, "Zoom to selection");
    const whole = element("button", { type: "button", onclick: () => this.timelines.forEach((one) => one.zoom(0, one.report.operations - 1)) }, "Whole step");
    const hint = element("span", { class: "faint" }, "Drag to select, click to pick, double-click for all.");
    const panels = this.timelines.map((timeline) => element("section", { class: "panel" }, element("h2", {}, isolated(panelTitle(timeline.report))), timeline.host,
      ...notesOf(timeline.report).map((note) => element("p", { class: "note" }, isolated(note)))));
    host.append(
      element("div", { class: "row toolbar" }, modes, zoom, whole, hint),
      element("div", { class: `charts charts${panels.length}` }, ...panels),
      this.aside,
      element("section", { class: "buffers" }, this.toolbar(), this.count, this.table.host),
      live,
    );
    host.classList.add(`reports${this.reports.length}`);
  }

  toolbar() {
    this.search = element("input", { type: "search", id: "search", placeholder: "name, line, module, type…", autocomplete: "off", spellcheck: "false",
      oninput: (event) => { this.query = event.target.value; this.updateTable(); } });
    this.scopes = choice("Which buffers", SCOPES, this.scope, (scope) => { this.scope = scope; this.updateTable(); });
    const together = element("input", { type: "checkbox", id: "together", onchange: (event) => { this.together = event.target.checked; this.updateTable(); } });
    together.checked = this.together;
    const which = this.reports.length < 2 ? null : choice("Report", this.reports.map((report, i) => [String(i), report.label]),
      String(this.reports.indexOf(this.report)), (i) => this.turnTo(this.reports[i]));
    this.which = which;
    return element("div", { class: "row toolbar" }, element("label", { for: "search" }, "Find"), this.search, which, this.scopes,
      element("label", { for: "together" }, together, " alike together"));
  }

  turnTo(report) {
    if (this.report === report) return;
    this.report = report;
    this.range = null;
    this.picked = new Set();
    if (this.scope === "range") this.scope = "peak";
    this.which?.show(String(this.reports.indexOf(report)));
    this.update();
  }

  select(report, from, to) {
    this.turnTo(report);
    this.range = [from, to];
    this.scope = "range";
    this.timelines.forEach((timeline) => timeline.showRange());
    this.updateTable();
    announce(`selected operations ${formatCount(from + 1)} to ${formatCount(to + 1)}`);
  }

  pickBand(report, band, operation) {
    this.turnTo(report);
    if (band.name === INSIDE) {
      announce(extraText());
      return;
    }
    const again = this.band === band.name && operation === undefined;
    this.band = again ? undefined : band.name;
    this.picked = new Set();
    if (operation !== undefined && !this.range) {
      this.range = [operation, operation];
      this.scope = "range";
    }
    this.update();
  }

  pickBuffers(report, buffers, reveal) {
    this.turnTo(report);
    this.picked = new Set(buffers);
    this.updateCharts();
    this.updateAside();
    if (reveal && buffers.length) {
      const [buffer] = buffers;
      if (!this.table.rows.some((row) => row.buffers.includes(buffer))) this.scope = "step";
      this.updateTable();
      this.table.reveal(buffer);
    } else this.table.render();
    if (buffers.length) announce(`picked ${plural(buffers.length, "buffer")}`);
  }

  clear(report) {
    this.turnTo(report);
    this.range = null;
    this.band = undefined;
    this.picked = new Set();
    if (this.scope === "range") this.scope = "peak";
    this.update();
    announce("selection cleared");
  }

  zoomToRange() {
    const timeline = this.timelines[this.reports.indexOf(this.report)];
    if (this.range) timeline.zoom(this.range[0], this.range[1]);
    else announce("nothing is selected");
  }

  update() {
    this.updateCharts();
    this.updateAside();
    this.updateTable();
  }

  updateCharts() {
    for (const timeline of this.timelines) timeline.draw();
  }

  updateAside() {
    const shown = this.picked.size ? [...details(this), ...legend(this)] : legend(this);
    this.aside.replaceChildren(...shown);
  }

  updateTable() {
    const { report } = this, matches = matching(report, this.query);
    const inBand = this.band === undefined ? undefined : (i) => bandOf(report, this.reports, this.mode, i).name === this.band;
    const last = report.operations - 1, peak = report.peak_index;
    const spans = { peak: [peak, peak], range: this.range ?? [peak, peak], step: [0, last] };
    this.scopes.show(this.scope === "range" && !this.range ? "peak" : this.scope);
    let [from, to] = spans[this.scope], note = "";
    let found = selected(report, from, to, matches, inBand);
    // A name that is nowhere in this part of the step may be in the rest of it.
    if (!found.length && this.query.trim() && this.scope !== "step") {
      found = selected(report, 0, last, matches, inBand);
      if (found.length) note = ` (none ${this.scope === "peak" ? "at the peak" : "in the selection"}: the whole step is shown)`;
      [from, to] = [0, last];
    }
    const rows = rowsOf(report, found, this.together);
    const sum = liveSum(report, found.length, (i) => found[i]).slice(from, to + 1);
    const where = from === to ? `live at operation ${formatCount(from + 1)}${from === peak ? ", the peak" : ""}`
      : from === 0 && to === last ? "in the whole step" : `live in operations ${formatCount(from + 1)} to ${formatCount(to + 1)}`;
    const { bands } = grouping(report, this.reports, this.mode);
    const label = bands.find((one) => one.name === this.band)?.label ?? this.band;
    const band = this.band === undefined ? "" : this.band === SMALLER ? ", drawn as one," : ` of ${label || "others"}`;
    this.count.replaceChildren(isolated(`${plural(found.length, "buffer")}${band} ${where}, ${from === to ? "" : "at most "}${formatBytes(peakOf(sum))}${from === to ? "" : " at a time"}${note}`));
    this.table.show(report, rows);
  }
}

function panelTitle(report) {
  const phase = phaseOf(report, report.peak_index);
  return `${report.label}: ${report.figure} peak ${formatBytes(report.peak)} at operation ${formatCount(report.peak_index + 1)} of ${formatCount(report.operations)}${phase && ` (${phase})`}`;
}

const notesOf = (report) => [...(report.small.count ? [smallText(report)] : []), ...report.notes];

// Light, dark, or as the system has it.
function themeButton(redraw) {
  const themes = ["system", "light", "dark"];
  let at = 0;
  const button = element("button", { type: "button", class: "theme", onclick: () => {
    at = (at + 1) % themes.length;
    if (at) document.documentElement.dataset.theme = themes[at];
    else delete document.documentElement.dataset.theme;
    button.textContent = `Theme: ${themes[at]}`;
    redraw();
  } }, "Theme: system");
  return button;
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const parts = [];
  if (data.reports.length) {
    const app = new App(data), host = document.getElementById("app");
    host.hidden = false;
    try {
      app.build(host);
      app.update();
    } catch (error) {
      host.hidden = true; // The tables without scripts stay.
      throw error;
    }
    parts.push(() => app.updateCharts());
  }
  if (data.frontier) {
    const chart = new FrontierChart(data.frontier, document.getElementById("frontier"));
    chart.draw();
    parts.push(() => chart.draw());
  }
  const redraw = () => parts.forEach((draw) => draw());
  if (parts.length) document.querySelector("header").append(themeButton(redraw));
  let waiting;
  addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(redraw);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.ready = "yes";
}

start();

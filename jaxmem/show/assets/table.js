// The table of buffers: a grid that makes only the rows that can be seen, of however many.

const ROW_HEIGHT = 27, SPARE_ROWS = 8;

const COLUMNS = [
  { id: "bytes", label: "Bytes", number: true, key: (row) => row.bytes, first: -1 },
  { id: "share", label: "Share", number: true, key: (row) => row.bytes, first: -1 },
  { id: "count", label: "Count", number: true, key: (row) => row.buffers.length, first: -1 },
  { id: "category", label: "Category", key: (row) => row.kind.category, first: 1 },
  { id: "name", label: "Buffer", key: (row) => row.kind.name, first: 1 },
  { id: "type", label: "Type", key: (row) => row.kind.type, first: 1 },
  { id: "source", label: "Source line", key: (row) => row.kind.source, first: 1 },
  { id: "module", label: "Module", key: (row) => row.kind.module, first: 1 },
  { id: "live", label: "Live", number: true, key: (row) => row.start, first: 1 },
];

class BufferTable {
  constructor(app) {
    this.app = app;
    this.rows = [];
    this.sort = { column: COLUMNS[0], direction: -1 };
    this.active = 0;
    this.heads = COLUMNS.map((column) => element("div", { role: "columnheader", class: column.number ? "number" : "" },
      element("button", { type: "button", onclick: () => this.sortBy(column) }, column.label)));
    this.space = element("div", { class: "space", role: "rowgroup" });
    this.scroller = element("div", { class: "scroller" }, this.space);
    this.host = element("div", {
      class: "grid", role: "grid", tabindex: 0, "aria-label": "Buffers. Up and down arrows move, Enter highlights in the chart.",
      "aria-colcount": COLUMNS.length,
    }, element("div", { role: "rowgroup", class: "head" }, element("div", { role: "row", "aria-rowindex": 1 }, ...this.heads)), this.scroller);
    this.scroller.tabIndex = -1;
    this.scroller.addEventListener("scroll", () => this.later());
    this.host.addEventListener("keydown", (event) => this.key(event));
    this.space.addEventListener("click", (event) => this.clicked(event));
  }

  show(report, rows) {
    this.report = report;
    this.rows = rows;
    for (const row of rows) {
      row.start = row.buffers.reduce((least, i) => Math.min(least, report.start[i]), Infinity);
      row.end = row.buffers.reduce((most, i) => Math.max(most, report.end[i]), 0);
    }
    this.active = 0;
    this.scroller.scrollTop = 0;
    this.ordered();
  }

  sortBy(column) {
    const again = this.sort.column === column;
    this.sort = { column, direction: again ? -this.sort.direction : column.first };
    this.active = 0;
    this.ordered();
  }

  ordered() {
    const { column: { key }, direction } = this.sort;
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    this.rows.sort((a, b) => direction * order(key(a), key(b)) || b.bytes - a.bytes || a.buffers[0] - b.buffers[0]);
    this.heads.forEach((head, i) => {
      const sorted = COLUMNS[i] === this.sort.column;
      head.setAttribute("aria-sort", sorted ? (direction > 0 ? "ascending" : "descending") : "none");
    });
    this.host.setAttribute("aria-rowcount", this.rows.length + 1);
    this.space.style.height = `${this.rows.length * ROW_HEIGHT}px`;
    this.render();
  }

  later() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this.render();
    });
  }

  render() {
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + (clientHeight || 400)) / ROW_HEIGHT) + SPARE_ROWS);
    const shown = [];
    for (let i = first; i < last; i++) shown.push(this.rowElement(this.rows[i], i));
    this.space.replaceChildren(...shown);
    if (this.rows.length) this.host.setAttribute("aria-activedescendant", `row${this.active}`);
    else this.host.removeAttribute("aria-activedescendant");
  }

  rowElement(row, index) {
    const picked = this.app.picked.size > 0 && row.buffers.some((i) => this.app.picked.has(i));
    const made = element("div", {
      role: "row", id: `row${index}`, "aria-rowindex": index + 2, "aria-selected": picked,
      class: index === this.active ? "active" : "", "data-index": index,
    }, ...this.cells(row).map(([column, content]) => element("div", {
      role: "gridcell", class: column.number ? "number" : "", title: typeof content === "string" ? content : null,
    }, typeof content === "string" ? isolated(content) : content)));
    made.style.transform = `translateY(${index * ROW_HEIGHT}px)`;
    return made;
  }

  cells(row) {
    const { report } = this, { kind, buffers } = row, one = buffers.length === 1;
    const live = `${formatCount(row.start + 1)}–${formatCount(row.end + 1)}`;
    const { color } = bandOf(report, this.app.reports, this.app.mode, buffers[0]);
    const category = element("span", {}, swatch(color), isolated(kind.category));
    row.name ??= one ? kind.name : spanned(report, buffers, "name");
    row.module ??= one ? kind.module : spanned(report, buffers, "module");
    const { name, module } = row;
    const texts = [
      formatBytes(row.bytes), formatShare(row.bytes, report.peak), formatCount(buffers.length), category,
      name, kind.type, kind.source, module, live,
    ];
    return COLUMNS.map((column, i) => [column, texts[i]]);
  }

  clicked(event) {
    const row = event.target.closest("[data-index]");
    if (!row) return;
    this.host.focus({ preventScroll: true });
    this.active = Number(row.dataset.index);
    this.pick();
  }

  pick() {
    const row = this.rows[this.active];
    if (!row) return;
    const again = row.buffers.every((i) => this.app.picked.has(i));
    this.app.pickBuffers(this.report, again ? [] : row.buffers, false);
  }

  // Brings the row of a buffer into view.
  reveal(buffer) {
    const index = this.rows.findIndex((row) => row.buffers.includes(buffer));
    if (index >= 0) this.goTo(index);
  }

  goTo(index) {
    this.active = Math.max(0, Math.min(index, this.rows.length - 1));
    const top = this.active * ROW_HEIGHT, { scrollTop, clientHeight } = this.scroller;
    if (top < scrollTop) this.scroller.scrollTop = top;
    if (top + ROW_HEIGHT > scrollTop + clientHeight) this.scroller.scrollTop = top + ROW_HEIGHT - clientHeight;
    this.render();
  }

  key(event) {
    if (event.target.closest("button")) return; // the heads sort
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.goTo(this.active + steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.pick();
    else if (event.key === "Escape") this.app.clear(this.report);
    else return;
    event.preventDefault();
  }
}

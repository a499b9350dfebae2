// The side of the page: the legend, which compares reports, and all about what is picked.

// One row for each band, with its bytes at each report's own peak; a click filters the table.
function legend(app) {
  const rows = new Map();
  app.reports.forEach((report, place) => {
    for (const band of grouping(report, app.reports, app.mode).bands) {
      if (!rows.has(band.name)) rows.set(band.name, { band, bytes: app.reports.map(() => 0) });
      rows.get(band.name).bytes[place] = band.peak;
    }
  });
  const most = Math.max(1, ...[...rows.values()].flatMap((row) => row.bytes));
  const list = element("ul", { class: "legend" });
  const ordered = [...rows.values()].sort((a, b) => Math.max(...b.bytes) - Math.max(...a.bytes));
  for (const { band, bytes } of ordered) {
    if (!bytes.some(Boolean)) continue;
    const bars = bytes.map((n, place) => {
      const bar = element("span", { class: "bar" });
      bar.style.width = `${(100 * n) / most}%`;
      bar.style.background = `var(--${band.color})`;
      const share = formatShare(n, app.reports[place].peak);
      return element("span", { class: "amount" }, element("span", { class: "room" }, bar), `${formatBytes(n)} ${share}`);
    });
    const inside = [swatch(band.color), element("span", { class: "label" }, isolated(band.label)), ...bars];
    const attributes = { type: "button", title: band.name === SMALLER ? smallText(app.report) : null, "aria-pressed": app.band === band.name, onclick: () => app.pickBand(app.report, band) };
    list.append(element("li", {}, band.name === INSIDE
      ? element("div", { class: "entry", title: extraText() }, ...inside)
      : element("button", { class: "entry", ...attributes }, ...inside)));
  }
  const figures = app.reports.length > 1 ? `, ${app.reports.map((report) => report.label.toLowerCase()).join(" and ")}` : "";
  return [element("h2", {}, `At the peak${figures}`), list];
}

function extraText() {
  return "live bytes that belong to no buffer in the list: what lives only inside a loop or a region that is not opened here";
}

function smallText(report) {
  const { count, largest } = report.small;
  return `Of ${plural(report.all, "buffer")} the ${formatCount(report.count)} largest are drawn one by one. The other `
    + `${formatCount(count)}, of at most ${formatBytes(largest)} each, are drawn together: at most `
    + `${formatBytes(peakOf(report.smallSum))} at a time, ${formatBytes(report.smallSum[report.peak_index])} at the peak. `
    + "The table and its search have all.";
}

// All that is known of the picked buffers.
function details(app) {
  const buffers = [...app.picked], { report } = app;
  const close = element("button", { type: "button", class: "small", onclick: () => app.pickBuffers(report, [], false) }, "Close");
  const head = element("div", { class: "row" }, element("h2", {}, buffers.length > 1 ? plural(buffers.length, "buffer") : "Buffer"), close);
  const kind = report.kinds[report.kind[buffers[0]]], bytes = buffers.reduce((sum, i) => sum + report.bytes[i], 0);
  const first = Math.min(...buffers.slice(0, 1000).map((i) => report.start[i])), last = Math.max(...buffers.slice(0, 1000).map((i) => report.end[i]));
  const place = (op) => `${formatCount(op + 1)}${phaseOf(report, op) && ` (${phaseOf(report, op)})`}`;
  const peak = buffers.filter((i) => report.start[i] <= report.peak_index && report.end[i] >= report.peak_index);
  const atPeak = peak.reduce((sum, i) => sum + report.bytes[i], 0);
  const each = buffers.length > 1 ? `, ${formatBytes(report.bytes[buffers[0]])} each` : "";
  const facts = [
    ["Name", spanned(report, buffers, "name")],
    ["Bytes", `${formatBytes(bytes)} (${formatCount(bytes)})${each}`],
    ["At the peak", atPeak ? `${formatBytes(atPeak)}, ${formatShare(atPeak, report.peak)} of it` : "not live"],
    ["Category", spanned(report, buffers, "category")],
    ["Type", spanned(report, buffers, "type")],
    ["Live", `operations ${place(first)} to ${place(last)}`],
    ["Source", spanned(report, buffers, "source")],
    ["Module", spanned(report, buffers, "module")],
    ["Path", spanned(report, buffers, "path")],
    ["Made by", spanned(report, buffers, "primitive")],
  ];
  const list = element("dl", {});
  for (const [term, text] of facts) {
    if (text) list.append(element("dt", {}, term), element("dd", {}, isolated(text)));
  }
  return [head, list];
}

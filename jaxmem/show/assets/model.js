// Decoded data: columns, sums over time, groups, search. Nothing here knows the page.

const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

// As jaxmem.units.format_bytes, which writes the other figures of the page: ties go to even.
function formatBytes(bytes) {
  for (const [unit, size] of UNITS) {
    if (Math.abs(bytes) >= size * (1 - 0.05 / 1024)) return oneDecimal(bytes / size) + unit;
  }
  return bytes.toFixed(0) + "B";
}

function oneDecimal(value) {
  const tenths = value * 10, below = Math.floor(tenths), over = tenths - below;
  const up = over > 0.5 || (over === 0.5 && below % 2 !== 0);
  return ((below + (up ? 1 : 0)) / 10).toFixed(1);
}

// As jaxmem.units.format_seconds.
function formatSeconds(seconds) {
  if (Math.abs(seconds) >= 59.995) {
    const whole = Math.round(Math.abs(seconds));
    const rest = String(whole % 60).padStart(2, "0");
    return `${seconds < 0 ? "-" : ""}${Math.floor(whole / 60)}min ${rest}s`;
  }
  for (const [unit, scale] of [["s", 1], ["ms", 1e3], ["us", 1e6]]) {
    const scaled = Math.abs(seconds * scale);
    if (scaled >= 0.9995) {
      return (seconds * scale).toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0) + unit;
    }
  }
  return seconds === 0 ? "0s" : (seconds * 1e9).toFixed(0) + "ns";
}

const formatCount = (count) => count.toLocaleString("en-US");

function formatShare(part, whole) {
  if (!(whole > 0)) return "-";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 0.5 ? "<1%" : `${percent.toFixed(0)}%`;
}

const plural = (count, noun) => `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;

function decodeReport(raw, fields) {
  const { bytes, start, span, kind } = raw.columns;
  const kinds = raw.kinds.map((numbers) =>
    Object.fromEntries(fields.map((field, i) => [field, raw.strings[numbers[i]]])));
  const report = {
    ...raw,
    kinds,
    // Those that are drawn one by one, in the order in which they start, and all: the small ones
    // after them are one band of the chart, and rows of the table like the others.
    count: bytes.length - raw.small.count,
    all: bytes.length,
    bytes: Float64Array.from(bytes),
    start: Int32Array.from(start),
    end: Int32Array.from(start, (first, i) => first + span[i]),
    kind: Int32Array.from(kind),
    rest: unrolled(raw.rest, raw.operations),
    groupings: new Map(),
  };
  report.smallSum = liveSum(report, raw.small.count, (i) => report.count + i);
  report.total = liveSum(report, report.count, (i) => i);
  for (let op = 0; op < report.operations; op++) {
    report.total[op] += report.smallSum[op] + report.rest[op];
  }
  return report;
}

function unrolled(runs, length) {
  const values = new Float64Array(length);
  for (let i = 0, at = 0; i < runs.length; i += 2) {
    values.fill(runs[i + 1], at, at + runs[i]);
    at += runs[i];
  }
  return values;
}

// The sum, at every operation, of `count` buffers; `pick` gives the number of each.
function liveSum(report, count, pick) {
  const sum = new Float64Array(report.operations + 1);
  for (let i = 0; i < count; i++) {
    const buffer = pick(i);
    sum[report.start[buffer]] += report.bytes[buffer];
    sum[report.end[buffer] + 1] -= report.bytes[buffer];
  }
  for (let op = 1; op <= report.operations; op++) sum[op] += sum[op - 1];
  return sum.subarray(0, report.operations);
}

// Names of bands that are no names of a program: those never have such a character.
const SMALLER = "\u0000smaller", INSIDE = "\u0000inside";

const peakOf = (sum) => sum.reduce((most, value) => Math.max(most, value), 0);

// What a buffer without a module belongs to: the argument or result that it is in.
const rootOf = (path) => path.split(/[.[/]/, 1)[0];
const firstParts = (path, count) => path.split("/").slice(0, count).join("/");

const MODES = {
  category: { label: "Category", most: 12, of: (kind) => kind.category },
  module: {
    label: "Module",
    most: 8,
    of: (kind) => (kind.module ? firstParts(kind.module, 1) : rootOf(kind.path) || "(no module)"),
  },
  layers: {
    label: "Layers together",
    most: 8,
    of: (kind) => (kind.module
      ? firstParts(kind.module, 2).replace(/\d+/g, "*")
      : rootOf(kind.path) || "(no module)"),
  },
  source: {
    label: "Source line",
    most: 8,
    of: (kind) => kind.source || rootOf(kind.path) || "(no line)",
  },
  buffers: { label: "Each buffer", most: 12, of: (kind) => kind.category },
};
// From the bottom of the stack: what stays longest first.
const CATEGORIES = ["argument", "constant", "output", "residual", "temporary", "fragmentation"];

// Names of the bands of a mode, the same for all reports of the page, the largest first.
function bandNames(reports, mode) {
  reports.names ??= new Map();
  if (!reports.names.has(mode)) {
    const { of, most } = MODES[mode], largest = new Map();
    for (const report of reports) {
      for (const [name, { peak, high }] of sumsByName(report, of)) {
        const [a, b] = largest.get(name) ?? [0, 0];
        largest.set(name, [Math.max(a, peak), Math.max(b, high)]);
      }
    }
    const ranked = [...largest].sort(([one, a], [two, b]) => b[0] - a[0] || b[1] - a[1] || (one < two ? -1 : 1));
    reports.names.set(mode, ranked.slice(0, most).map(([name]) => name));
  }
  return reports.names.get(mode);
}

function sumsByName(report, of) {
  const names = report.kinds.map(of), members = new Map();
  for (let i = 0; i < report.count; i++) {
    const name = names[report.kind[i]];
    if (!members.has(name)) members.set(name, []);
    members.get(name).push(i);
  }
  const found = new Map();
  for (const [name, buffers] of members) {
    const sum = liveSum(report, buffers.length, (i) => buffers[i]);
    found.set(name, { sum, peak: sum[report.peak_index], high: peakOf(sum) });
  }
  return found;
}

// The bands of a mode, from the bottom up, each with its sum at every operation, and the band of
// each kind of buffer.
function grouping(report, reports, mode) {
  const known = report.groupings.get(mode);
  if (known) return known;
  const { of } = MODES[mode], sums = sumsByName(report, of), names = bandNames(reports, mode);
  const bands = [];
  const push = (band) => bands.push({ ...band, peak: band.sum[report.peak_index] });
  names.forEach((name, i) => {
    if (sums.has(name)) push({ name, label: name || "(no name)", sum: sums.get(name).sum, color: colorName(name, mode, i) });
  });
  if (mode === "category" || mode === "buffers") {
    const rank = (band) => (CATEGORIES.indexOf(band.name) + 100) % 100;
    bands.sort((a, b) => rank(a) - rank(b));
  }
  const left = [...sums].filter(([name]) => !names.includes(name));
  if (left.length) {
    const sum = added(left.map(([, one]) => one.sum), report.operations);
    push({ name: null, label: "others", sum, color: "other" });
  }
  if (report.small.count) {
    push({ extra: true, name: SMALLER, label: plural(report.small.count, "smaller buffer"), sum: report.smallSum, color: "small" });
  }
  const rest = report.rest.map((value) => Math.max(0, value));
  if (peakOf(rest) > 0) push({ extra: true, name: INSIDE, label: "not in the list", sum: rest, color: "inside" });
  const place = new Map(bands.filter((band) => !band.extra).map((band) => [band.name, bands.indexOf(band)]));
  const bandOfKind = report.kinds.map((kind) => place.get(of(kind)) ?? place.get(null));
  const found = { bands, bandOfKind };
  report.groupings.set(mode, found);
  return found;
}

// The band that a buffer is drawn in.
function bandOf(report, reports, mode, buffer) {
  const { bands, bandOfKind } = grouping(report, reports, mode);
  return buffer < report.count ? bands[bandOfKind[report.kind[buffer]]] : bands.find((band) => band.name === SMALLER);
}

function colorName(name, mode, number) {
  const known = (mode === "category" || mode === "buffers") && CATEGORIES.includes(name);
  return known ? name : `p${number % 8}`;
}

function added(sums, length) {
  const all = new Float64Array(length);
  for (const sum of sums) for (let op = 0; op < length; op++) all[op] += sum[op];
  return all;
}

// One operation for each of at most `width` stretches: that with the most live bytes in it, so the
// stack shown there adds up to the true total and no peak is lost. `edges` is where stretches start.
function columnsOf(report, from, to, width) {
  const count = Math.min(to - from + 1, Math.max(1, width));
  const operations = new Int32Array(count), edges = new Float64Array(count + 1);
  for (let column = 0; column < count; column++) {
    const first = from + Math.floor((column * (to - from + 1)) / count);
    const next = from + Math.floor(((column + 1) * (to - from + 1)) / count);
    let best = first;
    for (let op = first + 1; op < next; op++) if (report.total[op] > report.total[best]) best = op;
    operations[column] = best;
    edges[column] = first;
  }
  edges[count] = to + 1;
  return { operations, edges };
}

function phaseOf(report, operation) {
  let name = "";
  for (const [phase, start] of report.phases) if (start <= operation) name = phase;
  return name;
}

// Buffers live at an operation, in the order in which they are stacked.
function liveAt(report, operation) {
  const found = [];
  for (let i = 0; i < report.count && report.start[i] <= operation; i++) {
    if (report.end[i] >= operation) found.push(i);
  }
  return found;
}

// Rectangles of single buffers, stacked in the order in which they start: a buffer sinks when one
// below it is freed. Neighbours of one band that are smaller than `least` are one rectangle, of
// buffer -1: there may be thousands of them, and each is thinner than can be seen.
function rectangles(report, columns, bandOfKind, least) {
  const found = [], open = new Map();
  let live = [], next = 0;
  columns.operations.forEach((operation, column) => {
    while (next < report.count && report.start[next] <= operation) live.push(next++);
    live = live.filter((buffer) => report.end[buffer] >= operation);
    let base = 0, thin = null;
    const extend = (key, buffer, band, bytes, from) => {
      const known = open.get(key);
      if (known && known.to === column && known.base === from && known.bytes === bytes) known.to = column + 1;
      else {
        const made = { buffer, band, bytes, from: column, to: column + 1, base: from };
        found.push(made);
        open.set(key, made);
      }
    };
    const flush = () => {
      if (thin) extend(`${thin.band} ${thin.base}`, -1, thin.band, thin.bytes, thin.base);
      thin = null;
    };
    for (const buffer of live) {
      const bytes = report.bytes[buffer], band = bandOfKind[report.kind[buffer]];
      if (bytes >= least) {
        flush();
        extend(buffer, buffer, band, bytes, base);
      } else if (thin?.band === band) thin.bytes += bytes;
      else {
        flush();
        thin = { band, base, bytes };
      }
      base += bytes;
    }
    flush();
  });
  return found;
}

const SEARCHED = ["name", "category", "type", "source", "module", "path", "primitive"];

// For each kind of buffer whether every word of the query is part of one of its names.
function matching(report, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return report.kinds.map(() => true);
  report.searched ??= report.kinds.map((kind) => SEARCHED.map((field) => kind[field]).join("\n").toLowerCase());
  return report.searched.map((text) => words.every((word) => text.includes(word)));
}

// The buffers that are live somewhere from operation `from` to `to`, of wanted kinds, and drawn in
// a band, if one is given.
function selected(report, from, to, wanted, inBand = () => true) {
  const found = [];
  for (let i = 0; i < report.all; i++) {
    if (report.start[i] <= to && report.end[i] >= from && wanted[report.kind[i]] && inBand(i)) found.push(i);
  }
  return found;
}

// Rows of the table: single buffers, or those alike (the same line of many layers) together.
function rowsOf(report, buffers, together) {
  if (!together) {
    return buffers.map((i) => ({ buffers: [i], kind: report.kinds[report.kind[i]], bytes: report.bytes[i] }));
  }
  const alike = new Map();
  for (const i of buffers) {
    const kind = report.kinds[report.kind[i]];
    const argument = kind.source ? "" : kind.path.replace(/\d+/g, "*");
    const name = argument ? "" : kind.name;
    const key = [name, kind.category, kind.type, kind.source, kind.primitive, argument].join("\n");
    const row = alike.get(key);
    if (row) {
      row.buffers.push(i);
      row.bytes += report.bytes[i];
    } else {
      alike.set(key, { buffers: [i], kind, bytes: report.bytes[i] });
    }
  }
  return [...alike.values()];
}

// One text for the values of a field of several buffers: "block*/mlp" where only numbers differ.
function spanned(report, buffers, field) {
  const values = new Set(buffers.map((i) => report.kinds[report.kind[i]][field]));
  const [first] = values;
  if (values.size === 1) return first;
  const general = new Set([...values].map((value) => value.replace(/\d+/g, "*")));
  if (general.size === 1) return [...general][0];
  return `${first} … ${[...values].pop()}`;
}

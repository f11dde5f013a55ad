// Curves: of the picked sample, between median and quartiles over all; of one unit, where one is pointed at.
const DECADES = 8;  // what is smaller still is drawn at the border, with a mark

class Axis {
  constructor(values, log, share, top, bottom) {
    this.log = log; this.top = top; this.bottom = bottom;
    let found = values.filter(v => typeof v === 'number' && Number.isFinite(v) && (!log || v > 0));
    let low = Infinity, high = -Infinity;
    for (const v of found) { if (v < low) low = v; if (v > high) high = v; }
    if (!found.length) { low = log ? .1 : 0; high = 1; }
    if (log) {
      this.high = Math.ceil(Math.log10(high) - 1e-9); this.low = Math.floor(Math.max(Math.log10(low), Math.log10(high) - DECADES) + 1e-9);
      if (this.low >= this.high) this.low = this.high - 1;
    } else if (share) { this.low = 0; this.high = 1; } else { this.low = low; this.high = high > low ? high : low + 1; }
  }

  down(value) {
    const measured = this.log ? (value > 0 ? Math.log10(value) : this.low) : value;
    const share = Math.min(1, Math.max(0, (measured - this.low) / (this.high - this.low)));
    return this.bottom - share * (this.bottom - this.top);
  }

  draw(panel) {
    const marks = this.log ? [] : ticks(this.low, this.high, 4);
    if (this.log) for (let k = this.low; k <= this.high; k += Math.max(1, Math.ceil((this.high - this.low) / 6))) marks.push(10 ** k);
    for (const value of marks) {
      const y = this.down(value);
      panel.svg.append(make('path', {class: 'grid', d: `M${WIDE.left} ${y}H${panel.right}`}));
      panel.label(WIDE.left - 6, y + 4, this.log && (value < 1e-3 || value > 1e3) ? value.toExponential(0).replace('+', '') : words(value), {'text-anchor': 'end'});
    }
  }
}

class Lines extends Panel {
  constructor(spec) {
    super(spec);
    this.cache = {};
    listen(['unit'], () => { if (this.drawn && spec.lines.some(line => line.unit)) this.refresh(); });
  }

  of(line, moment) {
    const key = `${line}-${moment}`;
    if (!this.cache[key]) {
      const held = this.spec.lines[line].moments[moment];
      const rows = decodeRows(held.rows, held.width, held.scale), found = {rows: {}, band: decodeRows(held.band, held.width, held.scale)};
      this.spec.samples.forEach((sample, i) => { found.rows[sample] = rows[i]; });
      if (held.own) found.own = decodeRows(held.own.band, held.width, held.own.scale);
      this.cache[key] = found;
    }
    return this.cache[key];
  }

  get relative() { return this.spec.log && state.own; }

  /* One curve as it is shown: as it is, or by its own peak. */
  shape(row) {
    if (!this.relative) return row;
    const peak = Math.max(0, ...row.filter(v => Number.isFinite(v)));
    return row.map(v => typeof v === 'number' ? (peak > 0 ? v / peak : v) : v);
  }

  async load() {
    this.single = [];
    const pointed = state.unit && state.unit.track === this.spec.track ? state.unit.unit : null;
    if (pointed === null) return;
    for (const [i, line] of this.spec.lines.entries()) {
      const map = line.unit && panels[line.unit[0]];
      const values = map ? await map.valuesOf(line.unit[1], pointed) : null;
      if (values) this.single.push([i, this.shape(values), map.spec.bin, pointed]);
    }
  }

  draw() {
    const spec = this.spec, log = spec.log && state.log, wide = this.plot.clientWidth > 520;
    this.open(wide ? 210 : 190);
    const moment = Math.min(state.moment, spec.lines[0].moments.length - 1), other = 1 - moment;
    const all = [], curves = [];
    spec.lines.forEach((line, i) => {
      const here = this.of(i, moment), band = this.relative ? here.own : here.band, row = here.rows[state.sample];
      const entry = {name: line.name, colour: `l${i % 6}`, band, row: row ? this.shape(row) : null, other: null};
      if (line.moments.length > 1) { const then = this.of(i, other); entry.other = (this.relative ? then.own : then.band)[1]; }
      all.push(...band[0], ...band[1], ...band[2], ...(entry.row || []), ...(entry.other || []));
      curves.push(entry);
    });
    this.single.forEach(([, values]) => all.push(...values));
    const axis = this.axis = new Axis(all, log, spec.share, WIDE.top, this.bottom);
    axis.draw(this);
    this.timeAxis('time step');
    this.side(this.relative ? 'share of own peak' : spec.y);
    this.curves = curves;
    if (curves[0].row) this.padding(curves[0].row, spec.bin);
    for (const curve of curves) {
      this.band(curve.band[0], curve.band[2], curve.colour);
      this.path(curve.band[1], `median ${curve.colour}`, spec.bin);
      if (curve.other) this.path(curve.other, `other ${curve.colour}`, spec.bin);
      if (curve.row) { this.path(curve.row, `line ${curve.colour}`, spec.bin); this.broken(curve.row); }
    }
    if (log && curves.some(c => c.row && c.row.some(v => typeof v === 'number' && v < 10 ** axis.low * .999))) {
      this.label(WIDE.left + 4, this.bottom - 4, `▾ below ${words(10 ** axis.low)}`, {class: 'below'});
    }
    for (const [i, values, bin] of this.single) this.path(values, `single l${i % 6}`, bin);
    this.svg.append(this.over);
    this.svg.addEventListener('pointermove', event => set({t: this.page(this.stepAt(this.at(event)[0]))}));
  }

  middle(i, bin) { return this.across(Math.min(this.steps - 1, i * bin + (bin - 1) / 2)); }

  path(values, kind, bin) {
    let d = '', pen = 'M', count = 0;
    values.forEach((value, i) => {
      if (typeof value !== 'number' || !Number.isFinite(value)) { if (count === 1) d += 'h0'; pen = 'M'; count = 0; return; }
      d += `${pen}${this.middle(i, bin).toFixed(1)} ${this.axis.down(value).toFixed(1)}`;
      pen = 'L'; count += 1;
    });
    if (count === 1) d += 'h0';
    this.svg.append(make('path', {class: kind, d}));
  }

  band(low, high, colour) {
    const kept = low.map((v, i) => i).filter(i => Number.isFinite(low[i]) && Number.isFinite(high[i]));
    if (kept.length < 2) return;
    const at = (i, values) => `${this.middle(i, this.spec.bin).toFixed(1)} ${this.axis.down(values[i]).toFixed(1)}`;
    const d = `M${kept.map(i => at(i, high)).join('L')}L${kept.reverse().map(i => at(i, low)).join('L')}Z`;
    this.svg.append(make('path', {class: `band ${colour}`, d}));
  }

  padding(row, bin) {
    row.forEach((value, i) => {
      if (value !== PADDING) return;
      const from = WIDE.left + i * bin / this.steps * (this.right - WIDE.left);
      const to = WIDE.left + Math.min(this.steps, (i + 1) * bin) / this.steps * (this.right - WIDE.left);
      this.svg.append(make('rect', {class: 'padding', x: from, y: WIDE.top, width: to - from + .3, height: this.bottom - WIDE.top}));
    });
  }

  broken(row) {
    row.forEach((value, i) => {
      if (Number.isNaN(value)) this.svg.append(make('path', {class: 'broken', d: `M${this.middle(i, this.spec.bin)} ${WIDE.top}v8`}));
    });
  }

  valueAt(curve, t) { return curve.row ? curve.row[Math.floor(t / this.spec.bin)] : null; }

  mark() {
    this.over.replaceChildren();
    const t = state.t === null ? null : this.own(state.t);
    if (t !== null) this.over.append(this.cursorAt(t));
    this.legend.replaceChildren(...this.curves.map(curve => {
      const value = t === null ? null : this.valueAt(curve, t);
      return make('span', {class: `key ${curve.colour}`}, t === null || value === null ? curve.name : `${curve.name} = ${value === PADDING ? 'padding' : words(value)}`);
    }));
    for (const [i, values, bin, unit] of this.single) {
      const value = t === null ? null : values[Math.floor(t / bin)];
      this.legend.append(make('span', {}, `unit ${unit}${value === null ? '' : ` ${this.spec.lines[i].name} = ${words(value)}`}`));
    }
    const other = D.moments[1 - state.moment];
    const many = D.samples.length > 1 ? `dashed: median of ${D.samples.length}` : '', then = other ? `dotted: ${other}` : '';
    if (many || then) this.legend.append(make('span', {}, [many, then].filter(Boolean).join('; ')));
  }

  csv() {
    const head = ['step', ...this.curves.flatMap(c => [c.name, `${c.name} median`, `${c.name} lower quartile`, `${c.name} upper quartile`])];
    const rows = this.curves[0].band[1].map((_, i) => [i * this.spec.bin, ...this.curves.flatMap(c => [c.row ? c.row[i] : '', c.band[1][i], c.band[0][i], c.band[2][i]])]);
    return [head, ...rows];
  }
}

/* Curves over something else than time: context, lag. */
class Curve extends Panel {
  redraws() { return ['log']; }
  get steps() { return 1; }

  draw() {
    const spec = this.spec;
    this.open(this.plot.clientWidth > 520 ? 210 : 190);
    const every = spec.lines.flatMap(line => [...line.y, ...(line.low || []), ...(line.high || [])]).concat(spec.levels.map(([v]) => v));
    const axis = this.axis = new Axis(every.map(v => v === null ? NaN : v), spec.log && state.log, false, WIDE.top, this.bottom);
    const places = spec.lines.flatMap(line => line.x).concat(spec.marks.map(([x]) => x)), first = Math.min(...places), last = Math.max(...places);
    this.place = x => WIDE.left + (x - first) / ((last - first) || 1) * (this.right - WIDE.left);
    axis.draw(this);
    for (const x of [...ticks(first, last, Math.max(2, Math.floor(this.width / 85))).filter(v => last - v > (last - first) * .06), last]) this.label(this.place(x), this.bottom + 14, x, {'text-anchor': 'middle'});
    this.label((WIDE.left + this.right) / 2, this.bottom + 29, spec.x, {'text-anchor': 'middle'});
    this.side(spec.y);
    spec.lines.forEach((line, i) => {
      const point = (x, y) => `${this.place(x).toFixed(1)} ${axis.down(y).toFixed(1)}`;
      if (line.low) {
        const kept = line.x.map((_, k) => k).filter(k => line.low[k] !== null && line.high[k] !== null);
        if (kept.length > 1) this.svg.append(make('path', {class: `band l${i % 6}`, d: `M${kept.map(k => point(line.x[k], line.high[k])).join('L')}L${kept.slice().reverse().map(k => point(line.x[k], line.low[k])).join('L')}Z`}));
      }
      let d = '', pen = 'M';
      line.x.forEach((x, k) => { if (line.y[k] === null) { pen = 'M'; return; } d += pen + point(x, line.y[k]); pen = 'L'; });
      this.svg.append(make('path', {class: `line l${i % 6}`, d}));
    });
    if (spec.log && state.log && spec.lines.some(line => line.y.some(v => v !== null && v < 10 ** axis.low * .999))) {
      this.label(WIDE.left + 4, this.bottom - 4, `▾ below ${words(10 ** axis.low)}`, {class: 'below'});
    }
    for (const [x, text] of spec.marks) {
      const end = this.place(x) > this.width / 2;
      this.svg.append(make('path', {class: 'mark', d: `M${this.place(x)} ${WIDE.top}V${this.bottom}`}));
      this.label(this.place(x) + (end ? -4 : 4), WIDE.top + 11, text, {class: 'word', 'text-anchor': end ? 'end' : 'start'});
    }
    for (const [value, text] of spec.levels) {
      const y = axis.down(value);
      this.svg.append(make('path', {class: 'level', d: `M${WIDE.left} ${y}H${this.right}`}));
      this.label(this.right - 4, y > WIDE.top + 14 ? y - 4 : y + 12, text, {class: 'word', 'text-anchor': 'end'});
    }
    this.svg.append(this.over);
    this.svg.addEventListener('pointermove', event => {
      const x = first + (this.at(event)[0] - WIDE.left) / (this.right - WIDE.left) * (last - first);
      this.tell(x);
    });
    this.svg.addEventListener('pointerleave', () => this.tell(null));
    this.tell(this.pointed === undefined ? null : this.pointed);
  }

  tell(x) {
    this.pointed = x;  // kept while the curves grow
    this.over.replaceChildren();
    this.legend.replaceChildren(...this.spec.lines.map((line, i) => {
      if (x === null) return make('span', {class: `key l${i % 6}`}, line.name);
      let near = 0;
      line.x.forEach((other, k) => { if (Math.abs(other - x) < Math.abs(line.x[near] - x)) near = k; });
      if (i === 0) this.over.append(make('path', {class: 'cursor', d: `M${this.place(line.x[near])} ${WIDE.top}V${this.bottom}`}));
      return make('span', {class: `key l${i % 6}`}, `${line.name} at ${line.x[near]}: ${words(line.y[near])}`);
    }));
  }

  csv() {
    const rows = this.spec.lines.flatMap(line => line.x.map((x, k) => [line.name, x, line.y[k], line.low ? line.low[k] : '', line.high ? line.high[k] : '']));
    return [['curve', this.spec.x, this.spec.y, 'lower', 'upper'], ...rows];
  }
}

// Maps: a row for each unit or feature, a column for each step; weights, with a column for each kernel; the time Jacobian.
class Picture extends Panel {
  constructor(spec) {
    super(spec);
    this.cache = {};
    this.choice = 0;
    if (spec.choices && spec.choices.length > 1) {
      const group = make('span', {class: 'choices', role: 'group'});
      spec.choices.forEach((choice, i) => group.append(make('button', {type: 'button', 'aria-pressed': i === 0, onclick: event => {
        this.choice = i;
        for (const button of group.children) button.setAttribute('aria-pressed', button === event.target);
        this.refresh();
      }}, choice.name)));
      this.tools.prepend(group);
    }
    if (spec.choices) this.kept = spec.choices.map((_, i) => document.getElementById(`${spec.id}-${i}`)).map(node => node && node.getAttribute('href'));
    listen(['pinned'], () => { if (this.drawn) this.mark(); });
  }

  get timed() { return !this.spec.columns; }
  get steps() { return this.spec.steps; }

  /* Codes and scale of one choice for the picked sample; null where the page does not carry them. */
  async held(choice, moment = state.moment, sample = state.sample) {
    const entry = this.spec.choices[choice], last = entry.moments.length - 1;
    const at = Math.min(moment, last), key = this.timed ? String(sample) : 'all', found = entry.moments[at][key];
    if (!found) return null;
    const name = `${choice}-${at}-${key}`;
    if (!this.cache[name]) {
      const rows = this.spec.rows, columns = Math.ceil(this.spec.steps / this.spec.bin);
      const codes = await decodePicture(found[0] || this.kept[choice], entry.palette, rows, columns);
      this.cache[name] = {codes, scale: found[1], rows, columns, palette: entry.palette};
    }
    return this.cache[name];
  }

  /* Values of one unit over the columns, by which curves show it. */
  async valuesOf(choice, unit) {
    const held = await this.held(choice);
    if (!held || unit >= held.rows) return null;
    return Array.from(held.codes.subarray(unit * held.columns, (unit + 1) * held.columns), code => ofCode(code, held.scale));
  }

  async load() { this.now = await this.held(this.choice); }

  /* The colour range: of this picture, or of all that the page carries. */
  range() {
    const {scale, palette} = this.now;
    if (palette === 'gate' || !this.timed || state.own) return scale;
    const every = this.spec.choices[this.choice].moments.flatMap(m => Object.values(m)).map(found => found[1]).filter(s => s[2] === scale[2]);
    const high = Math.max(...every.map(s => s[1])), low = Math.min(...every.map(s => s[0]));
    return [scale[2] ? Math.max(low, high - DECADES + 2) : low, high, scale[2]];
  }

  order() {
    const keys = this.track && this.spec.row === 'unit' && this.track.keys[state.sort];
    const rows = Array.from({length: this.spec.rows}, (_, i) => i);
    if (!keys || keys.length !== rows.length) return rows;
    return rows.sort((a, b) => (keys[b] === null ? -Infinity : keys[b]) - (keys[a] === null ? -Infinity : keys[a]) || a - b);
  }

  get tall() { return Math.min(Math.max(this.spec.rows * 6, 72), 260); }

  draw() {
    const spec = this.spec;
    this.open(spec.square ? WIDE.top + Math.min(this.plot.clientWidth * .8, 320) + WIDE.bottom : Math.max(210, WIDE.top + this.tall + WIDE.bottom));
    this.side(spec.row);
    this.rows = this.order();
    if (!this.now) {
      this.label(WIDE.left, WIDE.top + 24, `The page has no map of this sample: ${spec.bin > 1 || D.samples.length > 8 ? 'it would be too large' : 'it was not traced'}.`, {});
      this.label(WIDE.left, WIDE.top + 42, 'Typical, hardest and easiest have one.', {});
      this.svg.append(this.over);
      return;
    }
    const columns = spec.square ? this.rows : null;
    const image = this.paint(this.now, this.range(), columns);
    this.svg.append(make('image', {href: image, x: WIDE.left, y: WIDE.top, width: this.right - WIDE.left, height: this.bottom - WIDE.top, preserveAspectRatio: 'none'}));
    if (this.timed) this.hatch();
    this.names();
    if (spec.columns && spec.columns.length) {
      const room = (this.right - WIDE.left) / spec.columns.length, tight = spec.columns.some(name => name.length * 6.3 > room);
      spec.columns.forEach((name, i) => this.label(WIDE.left + (i + .5) * room, this.bottom + 14 + (tight && i % 2 ? 13 : 0), room < 40 ? name.replace(/^(.) (...).*$/, '$1 $2') : name, {'text-anchor': 'middle'}));
    } else if (spec.square) this.label((WIDE.left + this.right) / 2, this.bottom + 16, 'from unit', {'text-anchor': 'middle'});
    else this.timeAxis(spec.x || 'time step');
    this.svg.append(this.over);
    this.svg.addEventListener('pointermove', event => this.point(event));
    this.svg.addEventListener('pointerleave', () => { if (!state.pinned) set({unit: null}); });
    this.svg.addEventListener('click', event => this.click(event));
  }

  /* Steps that are padding. */
  hatch() {
    const {codes, columns} = this.now, wide = (this.right - WIDE.left) * this.spec.bin / this.spec.steps;
    for (let j = 0; j < columns; j++) if (codes[j] === 254) {
      const x = WIDE.left + j * wide;
      this.svg.append(make('rect', {class: 'padding', x, y: WIDE.top, width: Math.max(0, Math.min(wide + .3, this.right - x)), height: this.bottom - WIDE.top}));
    }
  }

  names() {
    const rows = this.rows.length, room = (this.bottom - WIDE.top) / rows;
    const every = Math.max(1, Math.ceil(13 / room));
    for (let i = 0; i < rows; i += every) this.label(WIDE.left - 6, WIDE.top + (i + .5) * room + 4, this.name(this.rows[i]), {'text-anchor': 'end'});
  }

  name(row) { return this.spec.names ? this.spec.names[row] : row; }

  paint(held, range, columns) {
    const {codes, scale, rows, columns: wide, palette} = held, canvas = make('canvas', {width: wide, height: rows});
    const brush = canvas.getContext('2d'), pixels = brush.createImageData(wide, rows), linear = scale[2] && !state.log;
    const top = scale[2] ? 10 ** range[1] : range[1], table = new Uint32Array(256);
    for (let code = 0; code < 256; code++) {
      let shade = code;
      if (code <= 250) {
        const value = scale[0] + code / 250 * (scale[1] - scale[0]);
        const share = linear ? (code === 0 ? 0 : 10 ** value / top) : (value - range[0]) / ((range[1] - range[0]) || 1);
        shade = Math.round(250 * Math.min(1, Math.max(0, scale[2] && code === 0 ? 0 : share)));
      }
      table[code] = palettes[palette][shade];
    }
    for (let i = 0; i < rows; i++) for (let j = 0; j < wide; j++) {
      const rgb = table[codes[this.rows[i] * wide + (columns ? columns[j] : j)]], at = 4 * (i * wide + j);
      pixels.data[at] = rgb >> 16; pixels.data[at + 1] = (rgb >> 8) & 255; pixels.data[at + 2] = rgb & 255; pixels.data[at + 3] = 255;
    }
    brush.putImageData(pixels, 0, 0);
    return canvas.toDataURL();
  }

  point(event) {
    const [x, y] = this.at(event);
    if (x < WIDE.left || x > this.right || y < WIDE.top || y > this.bottom || !this.now) return;
    const place = Math.min(this.rows.length - 1, Math.floor((y - WIDE.top) / (this.bottom - WIDE.top) * this.rows.length));
    const column = this.stepAt(x), found = {};
    if (this.timed) found.t = this.page(column);
    if (this.spec.row === 'unit' && !state.pinned) found.unit = {track: this.spec.track, unit: this.rows[place]};
    this.pointed = {row: this.rows[place], column: this.spec.square ? this.rows[column] : column};
    set(found);
    this.mark();
  }

  click(event) {
    this.point(event);
    if (this.spec.row !== 'unit' || !this.pointed) return;
    const unit = {track: this.spec.track, unit: this.pointed.row};
    const again = state.pinned && JSON.stringify(unit) === JSON.stringify(state.unit);
    set({pinned: !again, unit: again ? null : unit});
  }

  mark() {
    this.over.replaceChildren();
    if (!this.now) return;
    const t = state.t === null ? null : this.own(state.t), room = (this.bottom - WIDE.top) / this.rows.length;
    if (this.timed && t !== null) this.over.append(this.cursorAt(t));
    const lit = state.unit && state.unit.track === this.spec.track && this.spec.row === 'unit' ? state.unit.unit : null;
    if (lit !== null) {
      const place = this.rows.indexOf(lit), grow = Math.max(0, 3 - room) / 2;
      this.over.append(make('rect', {class: 'unit', x: WIDE.left, y: WIDE.top + place * room - grow, width: this.right - WIDE.left, height: room + 2 * grow}));
      if (this.spec.square) {
        const wide = (this.right - WIDE.left) / this.rows.length;
        this.over.append(make('rect', {class: 'unit', x: WIDE.left + place * wide, y: WIDE.top, width: wide, height: this.bottom - WIDE.top}));
      }
    }
    this.caption(lit, t);
  }

  caption(lit, t) {
    const {scale, columns, codes, palette} = this.now, range = this.range();
    const row = lit !== null ? lit : this.spec.row !== 'unit' && this.pointed ? this.pointed.row : null;
    const parts = [];
    const column = this.timed ? (t === null ? null : Math.floor(t / this.spec.bin)) : this.pointed ? Math.floor(this.pointed.column / this.spec.bin) : null;
    if (row !== null && this.spec.columns && this.spec.columns.length) {
      parts.push(`${this.spec.row} ${row}: ` + this.spec.columns.map((name, i) => `${name} ${words(ofCode(codes[row * columns + i], scale))}`).join(', '));
    } else if (row !== null && column !== null) {
      const value = ofCode(codes[row * columns + column], scale), where = this.timed ? `step ${t}` : this.spec.x ? `${this.spec.x} ${column * this.spec.bin}` : `from unit ${column}`;
      const small = scale[2] && value === 0 ? `below ${words(10 ** scale[0])}` : value === PADDING ? 'padding' : words(value);
      parts.push(`${this.spec.row} ${this.name(row)}, ${where}: ${small}`);
    }
    const low = scale[2] ? (state.log ? 10 ** range[0] : 0) : range[0], high = scale[2] ? 10 ** range[1] : range[1];
    const name = this.spec.choices[this.choice].name;
    this.legend.replaceChildren(make('span', {}, parts.join(' ') || name),
      make('span', {class: `ramp ${palette}`}, `${scale[2] && state.log ? '≤ ' : ''}${words(low)} `, make('i', {}), ` ${words(high)}`));
  }

  csv() {
    const {codes, scale, columns} = this.now || {columns: 0};
    const names = this.spec.columns && this.spec.columns.length ? this.spec.columns : Array.from({length: columns}, (_, j) => j * this.spec.bin);
    return [[this.spec.row, ...names], ...(this.now ? Array.from({length: this.spec.rows}, (_, i) => [this.name(i), ...Array.from({length: columns}, (_, j) => ofCode(codes[i * columns + j], scale))]) : [])];
  }
}

/* The time Jacobian, output steps upward: click a row, and the input is coloured by it. */
class Jacobian extends Panel {
  redraws() { return ['log']; }
  constructor(spec) {
    super(spec);
    const drawn = document.getElementById('jacobian-0');
    this.url = spec.png || (drawn && drawn.getAttribute('href'));
  }

  async load() {
    if (!this.codes) this.codes = await decodePicture(this.url, 'size', this.spec.rows, this.spec.width);
  }

  value(row, column) { return ofCode(this.codes[row * this.spec.width + column], this.spec.scale); }
  later(row, column) { return this.spec.causal && this.spec.first[column] > this.spec.out[row]; }

  /* Share of the colour scale, 0 to 1. */
  share(code) {
    const [low, high] = this.spec.scale;
    if (code > 250 || code === 0) return 0;
    return state.log ? code / 250 : 10 ** (low + code / 250 * (high - low) - high);
  }

  draw() {
    const {rows, width, out} = this.spec, wide = this.plot.clientWidth;
    this.open(WIDE.top + (rows === 1 ? 40 : Math.min(Math.max(wide * .42, 180), 420)) + WIDE.bottom);
    const canvas = make('canvas', {width, height: rows}), brush = canvas.getContext('2d'), pixels = brush.createImageData(width, rows);
    for (let i = 0; i < rows * width; i++) {
      const code = this.codes[i], rgb = palettes.size[code > 250 ? code : Math.round(250 * this.share(code))];
      const hidden = this.later(Math.floor(i / width), i % width);
      pixels.data.set([rgb >> 16, (rgb >> 8) & 255, rgb & 255, hidden ? 0 : 255], 4 * ((rows - 1 - Math.floor(i / width)) * width + i % width));
    }
    brush.putImageData(pixels, 0, 0);
    const box = {x: WIDE.left, y: WIDE.top, width: this.right - WIDE.left, height: this.bottom - WIDE.top};
    this.svg.append(make('rect', {class: 'hatched', ...box}), make('image', {href: canvas.toDataURL(), ...box, preserveAspectRatio: 'none'}));
    const room = box.height / rows, every = Math.max(1, Math.ceil(15 / room));
    for (let i = rows - 1; i >= 0; i -= every) this.label(WIDE.left - 6, this.bottom - (i + .5) * room + 4, out[i], {'text-anchor': 'end'});
    this.timeAxis('input step');
    this.side('output step');
    this.svg.append(this.over);
    this.svg.style.cursor = 'pointer';
    this.svg.addEventListener('pointermove', event => { const found = this.spot(event); this.pointed = found; if (found) set({t: this.page(found.t)}); this.mark(); });
    this.svg.addEventListener('click', event => { const found = this.spot(event); if (found) set({row: found.row}); });
  }

  spot(event) {
    const [x, y] = this.at(event);
    if (x < WIDE.left || x > this.right || y < WIDE.top || y > this.bottom) return null;
    const row = Math.min(this.spec.rows - 1, Math.floor((this.bottom - y) / (this.bottom - WIDE.top) * this.spec.rows));
    return {row, t: this.stepAt(x)};
  }

  mark() {
    this.over.replaceChildren();
    const {rows, out, bin, scale} = this.spec, room = (this.bottom - WIDE.top) / rows;
    if (state.t !== null) this.over.append(this.cursorAt(this.own(state.t)));
    const grow = Math.max(0, 4 - room) / 2;
    if (state.row !== null) this.over.append(make('rect', {class: 'row', x: WIDE.left, y: this.bottom - (state.row + 1) * room - grow, width: this.right - WIDE.left, height: room + 2 * grow}));
    const row = this.pointed ? this.pointed.row : state.row, t = state.t === null ? null : this.own(state.t);
    let text = row === null ? (document.getElementById('strip') ? 'click a row to colour the input by it' : '') : `output step ${out[row]}`;
    if (row !== null && t !== null) {
      const column = Math.floor(t / bin), value = this.value(row, column);
      text += `, input step ${t}: ${this.later(row, column) ? 'cannot depend on it, it comes later' : value === 0 ? `below ${words(10 ** scale[0])}` : words(value)}`;
    }
    this.legend.replaceChildren(make('span', {}, text),
      make('span', {class: 'ramp size'}, `${state.log ? '≤ ' : ''}${words(state.log ? 10 ** scale[0] : 0)} `, make('i', {}), ` ${words(10 ** scale[1])}`));
  }

  csv() {
    return [['output step', ...this.spec.first], ...this.spec.out.map((name, i) => [name, ...this.spec.first.map((_, j) => this.later(i, j) ? '' : this.value(i, j))])];
  }
}

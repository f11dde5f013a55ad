// What figures have in common: a place in the page, axes, a cursor, tools.
const panels = {};

class Panel {
  constructor(spec) {
    this.spec = spec;
    this.root = document.getElementById(spec.id);
    this.plot = this.root.querySelector('.plot');
    this.track = spec.track === null || spec.track === undefined ? null : D.tracks[spec.track];
    this.seen = false;
    panels[spec.id] = this;
    this.tools = make('div', {class: 'tools'});
    const code = this.root.querySelector('details.code');
    if (code) this.tools.append(code);
    this.root.append(this.tools);
    this.tools.append(
      make('button', {type: 'button', class: 'svg', title: 'Download this figure', onclick: () => saveSvg(this)}, 'SVG'),
      make('button', {type: 'button', class: 'csv', title: 'Download its numbers', onclick: () => saveCsv(this)}, 'CSV'));
    listen(this.redraws(), () => this.refresh());
    listen(['t', 'unit', 'row'], () => { if (this.drawn) this.mark(); });
  }

  redraws() { return ['sample', 'moment', 'log', 'own', 'sort']; }

  async refresh() {
    if (!this.seen) return;
    const call = this.call = (this.call || 0) + 1;
    await this.load();
    if (call !== this.call) return;  // another change came meanwhile
    this.draw();
    this.drawn = true;
    this.mark();
  }

  async load() {}
  draw() {}
  mark() {}

  /* An empty drawing of this width and height; the old one goes. */
  open(height) {
    this.width = Math.max(240, this.plot.clientWidth);
    this.height = height;
    this.right = this.width - WIDE.right;
    this.bottom = height - WIDE.bottom;
    this.svg = make('svg', {viewBox: `0 0 ${this.width} ${height}`, width: this.width, height, role: 'img', 'aria-label': this.spec.title});
    this.over = make('g', {class: 'over'});
    this.legend = make('p', {class: 'legend'});
    this.plot.replaceChildren(this.svg, this.legend);
    return this.svg;
  }

  get steps() { return this.spec.steps; }

  /* The middle of a step, in pixels; and the step at a place. Steps have a width in maps, so they have one everywhere. */
  across(step) { return WIDE.left + (step + .5) / this.steps * (this.right - WIDE.left); }
  stepAt(x) { return Math.min(this.steps - 1, Math.max(0, Math.floor((x - WIDE.left) / (this.right - WIDE.left) * this.steps))); }

  /* Steps of this figure and of the page may differ, where a layer has fewer of them. */
  own(step) { return this.steps === D.steps ? step : Math.min(this.steps - 1, Math.floor(step * this.steps / D.steps)); }
  page(step) { return this.steps === D.steps ? step : Math.min(D.steps - 1, Math.round(step * D.steps / this.steps)); }

  label(x, y, text, attributes) { this.svg.append(make('text', {x, y, ...attributes}, text)); }

  timeAxis(name) {
    const about = Math.max(2, Math.floor(this.width / 85));
    for (const step of stepTicks(this.steps - 1, about)) this.label(this.across(step), this.bottom + 14, step, {'text-anchor': 'middle'});
    this.label((WIDE.left + this.right) / 2, this.bottom + 29, name, {'text-anchor': 'middle'});
  }

  side(text) {
    this.svg.append(make('text', {transform: `translate(13 ${(WIDE.top + this.bottom) / 2}) rotate(-90)`, 'text-anchor': 'middle'}, text));
  }

  /* Where the pointer is, in the pixels of the drawing. */
  at(event) {
    const box = this.svg.getBoundingClientRect();
    return [(event.clientX - box.left) * this.width / box.width, (event.clientY - box.top) * this.height / box.height];
  }

  cursorAt(step) {
    return make('path', {class: 'cursor', d: `M${this.across(step).toFixed(1)} ${WIDE.top}V${this.bottom}`});
  }
}

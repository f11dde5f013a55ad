// What every part uses: the data of the page, its state, elements, numbers as words.
const D = JSON.parse(document.getElementById('data').textContent);
const WIDE = {left: 62, right: 12, top: 8, bottom: 34};

/* One state for all panels: who listens is told what changed. */
const state = {sample: D.typical, t: null, unit: null, pinned: false, moment: 0, log: true, own: false, sort: 'index', row: null};
const listeners = [];
function listen(keys, act) { listeners.push([new Set(keys), act]); }
let changed = new Set(), queued = false;
function set(values) {
  for (const [key, value] of Object.entries(values)) {
    if (JSON.stringify(state[key]) !== JSON.stringify(value)) { state[key] = value; changed.add(key); }
  }
  if (changed.size && !queued) { queued = true; requestAnimationFrame(tell); }
}
function tell() {
  const now = changed;
  changed = new Set(); queued = false;
  for (const [keys, act] of listeners) if ([...now].some(key => keys.has(key))) act(now);
}

const SVG = 'http://www.w3.org/2000/svg';
function make(tag, attributes, ...children) {
  const node = ['svg', 'g', 'path', 'text', 'rect', 'image', 'title'].includes(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value); else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

function words(value) {
  if (value === null || value === undefined) return '–';
  if (Number.isNaN(value)) return 'NaN or infinite';
  if (value === 0) return '0';
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(2).replace(/\.?0*e/, 'e');
}

function ticks(low, high, about) {
  const span = high - low;
  if (!(span > 0)) return [low];
  let step = 10 ** Math.floor(Math.log10(span / about));
  step *= [1, 2, 5, 10].find(m => span / (step * m) <= about) || 10;
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k++) found.push(Number((step * k).toPrecision(12)));
  return found;
}

/* Ticks of steps: round numbers, and always the last. */
function stepTicks(last, about) {
  return [...ticks(0, last, about).filter(v => Number.isInteger(v) && last - v > last * .06), last];
}

// The bar above the figures, the strip and the text of the input.
function toggle(label, key, on, off) {
  const button = make('button', {type: 'button', 'aria-pressed': state[key] === on, title: label, onclick: () => set({[key]: state[key] === on ? off : on})}, label);
  listen([key], () => button.setAttribute('aria-pressed', state[key] === on));
  return button;
}

function sampleWords(index) {
  const sample = D.samples[index];
  const loss = sample.loss === null ? (D.by_loss ? ', loss not finite' : '') : `, loss ${words(sample.loss)}`;
  return `sample ${sample.number}${loss}${sample.target ? `, target ${sample.target}` : ''}`;
}

function picker() {
  const row = make('div', {class: 'rowline'}), kinds = {};
  for (const [name, index] of [['typical', D.typical], ['hardest', D.hardest], ['easiest', D.easiest]]) {
    if (!D.order.includes(index) || Object.values(kinds).some(other => other === index)) continue;
    kinds[name] = index;
    const button = make('button', {type: 'button', class: `pick-${name}`, onclick: () => set({sample: index})}, name);
    const press = () => button.setAttribute('aria-pressed', state.sample === index);
    listen(['sample'], press); press();
    row.append(button);
  }
  const choose = make('select', {id: 'sample', 'aria-label': 'sample, by loss', onchange: event => set({sample: Number(event.target.value)})});
  for (const index of D.order) choose.append(make('option', {value: index}, sampleWords(index)));
  listen(['sample'], () => { choose.value = state.sample; });
  choose.value = state.sample;
  const step = way => { const place = D.order.indexOf(state.sample) + way; if (D.order[place] !== undefined) set({sample: D.order[place]}); };
  row.append(make('button', {type: 'button', 'aria-label': 'sample of smaller loss', onclick: () => step(-1)}, '‹'), choose,
    make('button', {type: 'button', 'aria-label': 'sample of larger loss', onclick: () => step(1)}, '›'));
  return row;
}

/* A bar for each sample, by loss: click one. */
function losses() {
  const wide = 1000, height = 26, svg = make('svg', {class: 'losses', viewBox: `0 0 ${wide} ${height}`, preserveAspectRatio: 'none', 'aria-hidden': 'true'});
  const known = D.samples.map(s => s.loss).filter(v => v !== null), high = Math.max(...known, 0), low = Math.min(...known, 0), room = wide / D.order.length;
  const bars = D.order.map((index, i) => {
    const loss = D.samples[index].loss, share = loss === null ? 1 : (loss - low) / ((high - low) || 1), tall = Math.max(3, share * height);
    const bar = make('rect', {x: i * room, y: height - tall, width: Math.max(1, room - Math.min(2, room * .2)), height: tall}, make('title', {}, sampleWords(index)));
    const press = () => bar.setAttribute('class', state.sample === index ? 'on' : loss === null ? 'bad' : '');
    listen(['sample'], press); press();
    return bar;
  });
  svg.append(...bars);
  svg.addEventListener('click', event => {
    const box = svg.getBoundingClientRect(), place = Math.floor((event.clientX - box.left) / box.width * D.order.length);
    set({sample: D.order[Math.max(0, Math.min(D.order.length - 1, place))]});
  });
  return svg;
}

function controls() {
  const bar = document.getElementById('controls');
  if (!bar || !D.samples.length) return;
  const sortable = new Set(D.tracks.flatMap(track => Object.keys(track.keys)));
  const sort = make('select', {id: 'sort', onchange: event => set({sort: event.target.value})}, make('option', {value: 'index'}, 'number'));
  for (const [key, text] of [['mean_lag', 'mean lag of its gradient'], ['saturation', 'saturation of its gates'], ['timescale', 'time constant'], ['norm', 'norm of its weights']]) {
    if (sortable.has(key)) sort.append(make('option', {value: key}, text));
  }
  const time = make('input', {type: 'range', id: 'time', min: 0, max: Math.max(0, D.steps - 1), step: 1, value: 0, oninput: event => set({t: Number(event.target.value)})});
  const step = make('output', {for: 'time'}, '–');
  listen(['t'], () => { if (state.t !== null) { time.value = state.t; step.textContent = state.t; } });
  const view = make('div', {class: 'rowline'});
  if (D.moments.length > 1) {
    const group = make('span', {class: 'choices', role: 'group', id: 'moments'});
    D.moments.forEach((name, i) => {
      const button = make('button', {type: 'button', 'aria-pressed': i === state.moment, onclick: () => set({moment: i})}, name);
      listen(['moment'], () => button.setAttribute('aria-pressed', state.moment === i));
      group.append(button);
    });
    view.append(group);
  }
  view.append(make('span', {class: 'choices', role: 'group'}, toggle('log', 'log', true, true), toggle('linear', 'log', false, false)));
  view.append(make('span', {class: 'choices', role: 'group'}, toggle('absolute', 'own', false, false), toggle('by own peak', 'own', true, true)));
  view.append(make('label', {}, 'units by', sort), make('label', {class: 'time'}, 'time step', time, step));
  const readout = make('p', {id: 'readout', 'aria-live': 'off'});
  const say = () => {
    readout.replaceChildren(make('b', {}, sampleWords(state.sample)));
    if (state.t !== null) readout.append(` · step ${state.t}${D.words && D.words[state.sample] ? ` “${D.words[state.sample][state.t]}”` : ''}`);
    if (state.unit) readout.append(` · unit ${state.unit.unit} of ${D.tracks[state.unit.track].title}${keysOf(state.unit)}${state.pinned ? ' (click it again to let it go)' : ''}`);
  };
  listen(['t', 'unit', 'sample', 'pinned'], say);
  bar.append(picker(), ...(D.order.length > 1 && D.by_loss ? [losses()] : []), view, readout);
  bar.hidden = false;
  say();
  document.addEventListener('keydown', event => {
    if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (way) { set({t: Math.min(D.steps - 1, Math.max(0, (state.t === null ? 0 : state.t) + way))}); event.preventDefault(); }
    if (event.key === 'Escape') set({unit: null, pinned: false});
  });
}

function keysOf({track, unit}) {
  return Object.entries(D.tracks[track].keys).map(([name, values]) => `, ${name} ${words(values[unit])}`).join('');
}

/* The input, step by step: coloured by the shown sample's own gradient or, after a click, by a row of the time Jacobian. */
function strip() {
  const host = document.getElementById('input-section'), own = panels['input-size'], map = panels.jacobian;
  if (!host || (!own && !map && !D.words)) return;
  const title = make('p', {class: 'words'}), canvas = make('canvas', {id: 'strip', width: 1, height: 1}), text = make('div', {class: 'tokens', id: 'tokens', tabindex: 0, role: 'group', 'aria-label': 'Tokens of the sample'});
  const back = make('button', {type: 'button', onclick: () => set({row: null})}, "show this sample's own gradient");
  const box = make('div', {class: 'figure strip'}, make('strong', {}, 'Input step by step'), title, canvas, ...(D.words ? [text] : []));
  host.querySelector('.figures').before(box);
  const gradient = () => own ? own.of(0, Math.min(state.moment, own.spec.lines[0].moments.length - 1)).rows[state.sample] : null;
  const padded = row => step => {  // a packed batch ends with its longest sample: what is beyond is padding, too
    const v = row ? row[Math.floor(step / own.spec.bin)] : 0;
    return v === PADDING || v === undefined;
  };
  const byGradient = row => {
    const peak = Math.max(0, ...row.filter(v => Number.isFinite(v)));
    return step => { const v = row[Math.floor(step / own.spec.bin)]; return Number.isFinite(v) ? (peak > 0 ? v / peak : 0) : null; };
  };
  const byRow = row => step => { const c = Math.floor(map.own(step) / map.spec.bin); return map.later(row, c) ? null : map.share(map.codes[row * map.spec.width + c]); };
  const act = async () => {
    const values = gradient();
    let shares = () => 0;
    if (state.row !== null) {
      await map.load();
      shares = byRow(state.row);
      title.replaceChildren(`Row of the time Jacobian: mean over ${map.spec.averaged || 1} samples, output step ${map.spec.out[state.row]}. `, ...(own ? [back] : []));
    } else if (values) {
      shares = byGradient(values);
      title.textContent = `Coloured by ${own.spec.lines[0].name} of ${sampleWords(state.sample)}, as a share of its peak.${map ? ' Click a row of the time Jacobian to colour by that.' : ''}`;
    } else title.textContent = map ? 'Click a row of the time Jacobian to colour the input by it.' : 'Not coloured: there is no gradient.';
    const pad = padded(values), colour = getComputedStyle(document.documentElement);
    canvas.width = D.steps;
    const brush = canvas.getContext('2d');
    for (let t = 0; t < D.steps; t++) {
      const share = shares(t);
      if (pad(t) || share === null) continue;  // hatched
      brush.globalAlpha = 1; brush.fillStyle = colour.getPropertyValue('--ground'); brush.fillRect(t, 0, 1, 1);
      brush.globalAlpha = share; brush.fillStyle = colour.getPropertyValue('--accent'); brush.fillRect(t, 0, 1, 1);
    }
    canvas.hidden = !values && state.row === null;
    canvas.dataset.row = state.row === null ? '' : state.row;
    if (!D.words) return;
    text.replaceChildren(...(D.words[state.sample] || []).map((word, t) => {
      const share = shares(t), span = make('span', {title: `step ${t}`, onpointerenter: () => set({t})}, word);
      if (pad(t)) span.className = 'pad';
      else if (share !== null) { span.dataset.share = share; span.style.background = `color-mix(in srgb, var(--accent) calc(${share} * var(--deepest)), transparent)`; }
      return span;
    }));
  };
  listen(['row', 'sample', 'moment', 'log'], act);
  listen(['t'], () => { for (const [t, span] of [...text.children].entries()) span.classList.toggle('at', t === state.t); });
  act();
}

// The page of a training: asks for the state of the runs, and draws what is new.
const KINDS = {curve: Curve, map: Picture};
let version = null;

function frameOf(spec) {
  return make('figure', {id: spec.id, class: `figure ${spec.kind}`},
    make('figcaption', {}, make('strong', {}, spec.title), ' ', make('span', {class: 'words'}, spec.words)),
    make('div', {class: 'plot', tabindex: 0, role: 'group', 'aria-label': spec.title}));
}

/* Frames come first, all of them: the width of a figure depends on how many there are. */
function add(spec) {
  if (panels[spec.id]) return;
  document.getElementById('figures').append(frameOf(spec));
  new KINDS[spec.kind](spec).seen = true;
}

function update(spec) {
  const panel = panels[spec.id];
  panel.spec = spec; panel.cache = {};
  return panel.refresh();
}

async function ask() {
  const state = await (await fetch('state')).json();
  const changed = state.version !== version;
  if (changed) {
    version = state.version;
    document.getElementById('alerts').replaceChildren(...state.alerts.map(alert => make('article', {class: 'finding fault'},
      make('p', {}, alert))));
    document.getElementById('runs').replaceChildren(...state.lines.map(line => make('span', {}, line)));
    state.figures.forEach(add);
    for (const spec of state.figures) await update(spec);
  }
  document.documentElement.dataset.ready = 'yes';
}

theme();
async function follow() {
  try { await ask(); } catch (error) { if (!(error instanceof TypeError)) throw error; }  // the server has ended: the page stays
  setTimeout(follow, 1000);
}
follow();
let resizing = null;
addEventListener('resize', () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { for (const panel of Object.values(panels)) panel.refresh(); }, 120);
});

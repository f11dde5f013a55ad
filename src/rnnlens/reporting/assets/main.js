// Start: a panel for each figure, drawn when it comes near the window.
const KINDS = {lines: Lines, curve: Curve, map: Picture, jacobian: Jacobian};
for (const spec of D.figures) new KINDS[spec.kind](spec);
theme();
controls();
strip();

function show(panel) { if (!panel.seen) { panel.seen = true; return panel.refresh(); } return null; }
const near = new IntersectionObserver(entries => {
  for (const entry of entries) if (entry.isIntersecting) show(panels[entry.target.id]);
}, {rootMargin: '400px'});
for (const panel of Object.values(panels)) near.observe(panel.root);

let resizing = null, wide = innerWidth;
addEventListener('resize', () => {
  if (innerWidth === wide) return;
  wide = innerWidth;
  clearTimeout(resizing);
  resizing = setTimeout(() => { for (const panel of Object.values(panels)) panel.refresh(); }, 120);
});
addEventListener('hashchange', () => { const target = document.getElementById(location.hash.slice(1)); const fold = target && target.closest('details'); if (fold) { fold.open = true; target.scrollIntoView(); } });
addEventListener('beforeprint', () => { for (const fold of document.querySelectorAll('details.more')) fold.open = true; for (const panel of Object.values(panels)) if (panel.drawn) panel.svg.removeAttribute('width'); });
document.documentElement.dataset.ready = 'yes';

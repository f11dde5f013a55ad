// Paths in three axes on a canvas: turned by dragging or by the arrow keys, named where the pointer is.
const S = JSON.parse(document.getElementById('data').textContent);
const canvas = document.querySelector('canvas'), pen = canvas.getContext('2d');
const until = document.querySelector('input'), output = document.querySelector('output'), readout = document.getElementById('readout');
const degree = Math.PI / 180, notes = readout.textContent;
let azimuth = S.azimuth, elevation = S.elevation, size = 0, high = 0, queued = false, drag = null, shown = [];

/* To the right and upward in pixels, and toward the reader. */
function project([x, y, z]) {
  const a = azimuth * degree, e = elevation * degree, scale = Math.min(size, high) * .42 / S.reach;
  const forth = Math.cos(a) * x + Math.sin(a) * y;
  return [size / 2 + scale * (Math.cos(a) * y - Math.sin(a) * x), high / 2 - scale * (Math.cos(e) * z - Math.sin(e) * forth), Math.cos(e) * forth + Math.sin(e) * z];
}
function line(from, to, colour, alpha, width) {
  pen.globalAlpha = alpha; pen.strokeStyle = colour; pen.lineWidth = width;
  pen.beginPath(); pen.moveTo(from[0], from[1]); pen.lineTo(to[0], to[1]); pen.stroke();
}
function word(text, [x, y], colour) {
  pen.globalAlpha = 1; pen.fillStyle = colour;
  const wide = pen.measureText(text).width;
  pen.fillText(text, Math.max(4, Math.min(x < size / 2 ? x - wide - 4 : x + 4, size - wide - 4)), Math.max(14, Math.min(y - 4, high - 6)));
}
function dot([x, y], colour, radius, ground) {
  pen.globalAlpha = 1; pen.fillStyle = colour; pen.strokeStyle = ground; pen.lineWidth = 1.5;
  pen.beginPath(); pen.arc(x, y, radius, 0, 2 * Math.PI); pen.stroke(); pen.fill();
}
function draw() {
  queued = false;
  const style = getComputedStyle(document.body), ink = style.getPropertyValue('--ink'), soft = style.getPropertyValue('--soft'), ground = style.getPropertyValue('--ground');
  const ratio = devicePixelRatio || 1;
  size = canvas.clientWidth; high = canvas.clientHeight;
  canvas.width = size * ratio; canvas.height = high * ratio;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = '12px system-ui, sans-serif'; pen.lineCap = 'round';
  const last = Number(until.value), items = [];
  for (const axis of [0, 1, 2]) {
    const end = [0, 0, 0]; end[axis] = S.axis;
    line(project(end.map(v => -v)), project(end), soft, .5, 1);
    word(S.labels[axis], project(end), soft);
  }
  shown = S.paths.map(path => path.at.slice(0, last + 1).map(project));
  shown.forEach((points, number) => {
    for (let t = 1; t < points.length; t++) {
      items.push([points[t][2] + points[t - 1][2], () => line(points[t - 1], points[t], S.paths[number].colour, .15 + .8 * (t - 1) / Math.max(S.steps.length - 2, 1), 1.4)]);
    }
    const end = points[points.length - 1];
    items.push([2 * end[2], () => dot(end, S.paths[number].colour, 2.5, ground)]);
  });
  for (const mark of S.marks) {
    if (mark.bar) {
      const [from, to] = mark.bar.map(project);
      items.push([from[2] + to[2], () => line(from, to, ink, 1, 1.5)]);
    } else {
      const at = project(mark.at);
      items.push([2 * at[2] + 1, () => dot(at, mark.colour, 5, ground)]);
    }
  }
  items.sort((one, other) => one[0] - other[0]).forEach(item => item[1]());
  for (const arrow of S.arrows) { const to = project(arrow.to); line(project([0, 0, 0]), to, ink, .9, 2); dot(to, ink, 3, ground); word(arrow.name, to, ink); }
  output.textContent = String(S.steps[last]);
  canvas.dataset.view = `${Math.round(azimuth)} ${Math.round(elevation)}`;
}
function again() { if (!queued) { queued = true; requestAnimationFrame(draw); } }
function turn(right, up) { azimuth -= right; elevation = Math.max(-90, Math.min(90, elevation + up)); again(); }

/* Names the nearest point of a path or mark within 12 pixels. */
function point(x, y) {
  let near = 12, text = notes;
  shown.forEach((points, number) => points.forEach((at, t) => {
    const far = Math.hypot(at[0] - x, at[1] - y);
    if (far < near) { near = far; text = `${S.paths[number].name}, step ${S.steps[t]}`; }
  }));
  for (const mark of S.marks) {
    if (!mark.at) continue;
    const at = project(mark.at), far = Math.hypot(at[0] - x, at[1] - y);
    if (far < Math.min(near, 8)) { near = far; text = mark.name; }
  }
  readout.textContent = text;
}
canvas.addEventListener('pointerdown', event => { drag = [event.clientX, event.clientY]; canvas.setPointerCapture(event.pointerId); });
canvas.addEventListener('pointerup', () => { drag = null; });
canvas.addEventListener('pointercancel', () => { drag = null; });
canvas.addEventListener('pointermove', event => {
  if (!drag) { point(event.offsetX, event.offsetY); return; }
  turn((event.clientX - drag[0]) * .5, (event.clientY - drag[1]) * .5);
  drag = [event.clientX, event.clientY];
});
canvas.addEventListener('keydown', event => {
  const [right, up] = {ArrowLeft: [-10, 0], ArrowRight: [10, 0], ArrowUp: [0, -10], ArrowDown: [0, 10]}[event.key] || [];
  if (right !== undefined) { turn(right, up); event.preventDefault(); }
});
until.addEventListener('input', again);
document.querySelector('.reset').addEventListener('click', () => { azimuth = S.azimuth; elevation = S.elevation; again(); });
document.querySelector('.theme').addEventListener('click', again);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', again);
addEventListener('resize', again);
theme();
draw();
document.documentElement.dataset.ready = 'yes';

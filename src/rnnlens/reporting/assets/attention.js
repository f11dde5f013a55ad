// Two maps of a channel from input to output steps, coefficients held and total, with the numbers of the cell that is pointed at.
const S = JSON.parse(document.getElementById('data').textContent);
const readout = document.getElementById('readout'), choice = document.querySelector('select'), boards = [...document.querySelectorAll('canvas')];
const rows = S.out.length, columns = S.in.length;
const RAMP = [[8, 48, 107], [31, 111, 180], [143, 193, 227], [255, 255, 255], [253, 185, 120], [221, 107, 16], [127, 39, 4]];
let cell = null;

/* Colour of a share of the largest value, -1 to 1. */
function colour(share) {
  const at = (Math.max(-1, Math.min(1, share)) + 1) * (RAMP.length - 1) / 2, low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((part, i) => Math.round(part + (at - low) * (RAMP[low + 1][i] - part)));
}
function paint() {
  const channel = S.channels[choice.value];
  boards.forEach((board, k) => {
    board.width = columns; board.height = rows;
    const brush = board.getContext('2d'), pixels = brush.createImageData(columns, rows);
    channel.maps[k].forEach((value, i) => {
      const place = (rows - 1 - Math.floor(i / columns)) * columns + i % columns;
      pixels.data.set(value === null ? [255, 0, 60, 255] : [...colour(value / channel.largest), 255], 4 * place);
    });
    brush.putImageData(pixels, 0, 0);
  });
  say();
}
function name(steps, at) { return `step ${steps[at]}${S.words ? ` “${S.words[steps[at]].trim()}”` : ''}`; }
function say() {
  if (!cell) { readout.textContent = 'point at a cell, or move it by the arrow keys'; return; }
  const at = cell[0] * columns + cell[1], values = S.channels[choice.value].maps.map(map => map[at] === null ? 'not finite' : map[at]);
  readout.textContent = `output ${name(S.out, cell[0])} from input ${name(S.in, cell[1])}: ` + S.titles.map((title, k) => `${title} ${values[k]}`).join(', ');
}
function within(at, count) { return Math.max(0, Math.min(count - 1, at)); }
for (const board of boards) {
  board.addEventListener('pointermove', event => {
    cell = [rows - 1 - within(Math.floor(event.offsetY / board.clientHeight * rows), rows), within(Math.floor(event.offsetX / board.clientWidth * columns), columns)];
    say();
  });
  board.addEventListener('keydown', event => {
    const move = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, 0], ArrowDown: [-1, 0]}[event.key];
    if (!move) return;
    const [row, column] = cell || [rows - 1, columns - 1];
    cell = cell ? [within(row + move[0], rows), within(column + move[1], columns)] : [row, column];
    say();
    event.preventDefault();
  });
}
choice.addEventListener('change', paint);
theme();
paint();
document.documentElement.dataset.ready = 'yes';

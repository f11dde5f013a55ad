// Words shaded by their effect on one output step, with the number of the one that is pointed at.
const S = JSON.parse(document.getElementById('data').textContent);
const host = document.getElementById('words'), readout = document.getElementById('readout'), choice = document.querySelector('select');
let shown = S.rows.length - 1;

/* Share of the largest value of the row; with logarithmic colours four decades below it are seen. */
function share(value, peak) {
  if (value === null || !(peak > 0) || value <= 0) return 0;
  return S.log ? Math.max(0, 1 + Math.log10(value / peak) / 4) : value / peak;
}
function label() { return S.label.replace('{}', S.rows[shown].step); }
function say(t) {
  const row = S.rows[shown].values, peak = Math.max(0, ...row.filter(v => v !== null)), value = row[t];
  readout.textContent = `step ${t}, “${S.words[t].trim()}”: ${label()} ${value === null ? 'is padding or not finite' : `${value}, ${peak > 0 ? Math.round(100 * value / peak) : 0} % of the largest`}`;
}
function paint() {
  const row = S.rows[shown].values, peak = Math.max(0, ...row.filter(v => v !== null));
  [...host.children].forEach((word, t) => {
    const part = share(row[t], peak);
    word.dataset.share = part.toFixed(3);
    word.style.background = `color-mix(in srgb, var(--accent) calc(${part} * var(--deepest)), transparent)`;
    word.classList.toggle('pad', row[t] === null);
    word.classList.toggle('at', S.rows.length > 1 && S.rows[shown].step === String(t));
  });
  choice.value = String(shown);
  readout.textContent = label();
}
S.words.forEach((text, t) => {
  const word = document.createElement('button'), asked = S.rows.findIndex(row => row.step === String(t));
  word.type = 'button';
  word.textContent = text;
  word.addEventListener('pointerenter', () => say(t));
  word.addEventListener('focus', () => say(t));
  if (S.rows.length > 1 && asked >= 0) word.addEventListener('click', () => { shown = asked; paint(); });
  host.append(word);
});
choice.addEventListener('change', () => { shown = Number(choice.value); paint(); });
theme();
paint();
document.documentElement.dataset.ready = 'yes';

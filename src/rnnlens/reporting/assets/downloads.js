// A figure as a file: the drawing with its colours written out, or its numbers.
function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], {type}));
  const link = make('a', {href: url, download: name});
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const STYLES = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linecap', 'opacity', 'font-size', 'font-family', 'image-rendering'];

function saveSvg(panel) {
  const copy = panel.svg.cloneNode(true), from = [panel.svg, ...panel.svg.querySelectorAll('*')];
  [copy, ...copy.querySelectorAll('*')].forEach((node, i) => {
    const style = getComputedStyle(from[i]);
    if (node.tagName === 'path' || node.tagName === 'rect' || node.tagName === 'text' || node.tagName === 'image') {
      for (const name of STYLES) node.style.setProperty(name, style.getPropertyValue(name).replace(/url\([^)]*\)/, 'none'));
    }
  });
  copy.setAttribute('xmlns', SVG);
  const ground = getComputedStyle(document.body).backgroundColor;
  const back = make('rect', {width: panel.width, height: panel.height});
  back.style.fill = ground;
  copy.prepend(back);
  save(`${panel.spec.id}.svg`, 'image/svg+xml', new XMLSerializer().serializeToString(copy));
}

function cell(value) {
  if (value === null || value === undefined || value === PADDING) return '';
  if (typeof value === 'number') return Number.isNaN(value) ? 'nan' : String(Number(value.toPrecision(6)));
  const text = /^[=+@\t\r-]/.test(value) ? `'${value}` : String(value);  // no spreadsheet takes a name for a formula
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function saveCsv(panel) {
  save(`${panel.spec.id}.csv`, 'text/csv', panel.csv().map(row => row.map(cell).join(',')).join('\r\n') + '\r\n');
}

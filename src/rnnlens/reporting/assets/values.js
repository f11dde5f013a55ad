// From what the page carries to numbers: codes of curves, colours of maps.
const PADDING = 'padding';

function ofScale([low, high, log], share) {
  const value = low + share * (high - low);
  return log ? 10 ** value : value;
}

/* Base64 of 16-bit codes: rows of values, NaN for what is not finite, PADDING for no data. */
function decodeRows(text, width, scale) {
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const codes = new Uint16Array(bytes.buffer), rows = [];
  for (let start = 0; start < codes.length; start += width) {
    rows.push(Array.from(codes.subarray(start, start + width), code =>
      code === 65535 ? NaN : code === 65534 ? PADDING : scale[2] && code === 0 ? 0 : ofScale(scale, code / 65000)));
  }
  return rows;
}

const palettes = {}, inverse = {};
for (const [name, hex] of Object.entries(D.palettes)) {
  palettes[name] = []; inverse[name] = new Map();
  for (let code = 0; code < 256; code++) {
    const rgb = parseInt(hex.substr(code * 6, 6), 16);
    palettes[name].push(rgb);
    if (code <= 250 || code >= 254) inverse[name].set(rgb, code);
  }
}

function nearest(name, rgb) {  // of a browser that changes colours
  let best = 0, least = Infinity;
  palettes[name].forEach((other, code) => {
    if (code > 250 && code < 254) return;
    let distance = 0;
    for (const shift of [16, 8, 0]) distance += (((rgb >> shift) & 255) - ((other >> shift) & 255)) ** 2;
    if (distance < least) { least = distance; best = code; }
  });
  inverse[name].set(rgb, best);
  return best;
}

/* The codes of a picture, rows by columns. */
async function decodePicture(url, palette, rows, columns) {
  const picture = new Image();
  picture.src = url;
  await picture.decode();
  const canvas = make('canvas', {width: columns, height: rows});
  const brush = canvas.getContext('2d', {willReadFrequently: true});
  brush.drawImage(picture, 0, 0);
  const pixels = brush.getImageData(0, 0, columns, rows).data, codes = new Uint8Array(rows * columns);
  const back = inverse[palette];
  for (let i = 0; i < codes.length; i++) {
    const rgb = (pixels[4 * i] << 16) | (pixels[4 * i + 1] << 8) | pixels[4 * i + 2];
    const code = back.get(rgb);
    codes[i] = code === undefined ? nearest(palette, rgb) : code;
  }
  return codes;
}

function ofCode(code, scale) {
  if (code === 255) return NaN;
  if (code === 254) return PADDING;
  return scale[2] && code === 0 ? 0 : ofScale(scale, code / 250);
}

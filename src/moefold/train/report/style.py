"""What the page of a run adds to the common looks: maps of experts, and a script that shows values at the pointer."""

from __future__ import annotations

from moefold.html.document import CSS as COMMON

CSS = (
    COMMON
    + """
.heat{display:block;width:100%;image-rendering:pixelated;border:1px solid var(--line);border-radius:4px}
.heat.tall{height:150px}.many .heat.tall{height:110px}
.maps{display:grid;grid-template-columns:repeat(var(--columns),minmax(0,1fr));gap:12px}
@media (max-width:700px){.maps{grid-template-columns:repeat(2,minmax(0,1fr))}}
.maps p{margin:0 0 3px;font-size:12.5px;color:var(--soft)}
.now{display:flex;gap:8px}.rows{display:flex;flex-direction:column;justify-content:space-around;min-width:18px;color:var(--soft);
font-size:11.5px;line-height:1.2;text-align:right}.rows.ends{justify-content:space-between}
.now .heat{flex:1;min-width:0}
.strip{width:120px;height:12px;image-rendering:auto;border:1px solid var(--line);border-radius:3px;margin:0 -8px}
"""
)

SCRIPT = """
const place = (tip, figure, x, y) => {
  const half = tip.offsetWidth / 2;
  tip.style.left = `${Math.min(Math.max(x, half + 4), figure.offsetWidth - half - 4)}px`;
  tip.style.top = `${y}px`;
};
for (const svg of document.querySelectorAll('svg[data-hover]')) {
  const data = JSON.parse(svg.dataset.hover), figure = svg.closest('figure');
  const line = document.createElementNS(svg.namespaceURI, 'path'), tip = document.createElement('div');
  line.setAttribute('class', 'cursor'); tip.className = 'tip';
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let i = 0;
    data.x.forEach((x, k) => { if (Math.abs(x - at) < Math.abs(data.x[i] - at)) i = k; });
    line.setAttribute('d', `M${data.x[i]} 10V${svg.viewBox.baseVal.height - 26}`);
    const shown = Object.entries(data.curves).filter(([, v]) => v[i] !== null).map(([n, v]) => `${n} ${v[i]}`);
    tip.textContent = [`step ${data.steps[i].toLocaleString('en')}`, ...shown].join(' · ');
    const frame = figure.getBoundingClientRect();
    svg.append(line); figure.append(tip);
    const across = data.x[i] * box.width / svg.viewBox.baseVal.width;
    place(tip, figure, box.left - frame.left + across, box.top - frame.top + 8);
  });
  svg.addEventListener('pointerleave', () => { line.remove(); tip.remove(); });
}
for (const map of document.querySelectorAll('figure[data-cells] img.heat')) {
  const figure = map.closest('figure'), cells = JSON.parse(figure.dataset.cells);
  const tip = document.createElement('div'), canvas = document.createElement('canvas');
  let pen = null;
  tip.className = 'tip';
  map.addEventListener('pointermove', event => {
    if (!pen) {
      canvas.width = map.naturalWidth; canvas.height = map.naturalHeight;
      pen = canvas.getContext('2d', {willReadFrequently: true}); pen.drawImage(map, 0, 0);
    }
    const box = map.getBoundingClientRect(), frame = figure.getBoundingClientRect();
    const inside = (part, size) => Math.min(Math.max(Math.floor(part * size), 0), size - 1);
    const x = inside((event.clientX - box.left) / box.width, canvas.width);
    const y = inside((event.clientY - box.top) / box.height, canvas.height);
    const [red, , blue, seen] = pen.getImageData(x, y, 1, 1).data;
    const load = (2 ** (Math.sign(red - blue) * seen / cells.perDoubling)).toFixed(2);
    const beyond = seen === cells.most ? (red > blue ? ' or more' : ' or less') : '';
    const told = seen === 255 ? 'no token' : `${load} times the mean${beyond}`;
    tip.textContent = [map.alt, cells.columns[x], cells.rows[y], told].filter(Boolean).join(' · ');
    figure.append(tip);
    place(tip, figure, event.clientX - frame.left, event.clientY - frame.top - 6);
  });
  map.addEventListener('pointerleave', () => tip.remove());
}
"""

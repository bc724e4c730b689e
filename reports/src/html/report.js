'use strict';
for (const button of document.querySelectorAll('[data-copy]')) {
  button.addEventListener('click', () => {
    const text = document.getElementById(button.dataset.copy).textContent;
    const done = () => { button.textContent = 'Copied'; setTimeout(() => { button.textContent = 'Copy'; }, 1200); };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => {});
  });
}
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    heads.forEach(h => h.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const value = row => row.cells[column].textContent;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const x = value(a), y = value(b), nx = parseFloat(x), ny = parseFloat(y);
      const order = Number.isNaN(nx) || Number.isNaN(ny) ? x.localeCompare(y) : nx - ny;
      return down ? -order : order;
    });
    table.tBodies[0].append(...rows);
  }));
}
const gantt = document.getElementById('gantt');
if (gantt) {
  const tip = document.getElementById('tip');
  gantt.addEventListener('mousemove', event => {
    const text = event.target.dataset && event.target.dataset.t;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + 'px';
    tip.style.top = event.clientY + 16 + 'px';
  });
  gantt.addEventListener('mouseleave', () => { tip.hidden = true; });
  gantt.addEventListener('click', event => {
    const batch = event.target.dataset && event.target.dataset.m;
    gantt.classList.toggle('dim', batch !== undefined);
    for (const bar of gantt.querySelectorAll('rect')) bar.classList.toggle('lit', bar.dataset.m === batch);
  });
  let zoom = 1;
  gantt.parentElement.addEventListener('wheel', event => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const frame = gantt.parentElement, at = (frame.scrollLeft + event.offsetX) / gantt.clientWidth;
    zoom = Math.min(40, Math.max(1, zoom * (event.deltaY < 0 ? 1.25 : 0.8)));
    gantt.setAttribute('width', zoom * 100 + '%');
    gantt.setAttribute('preserveAspectRatio', zoom > 1 ? 'none' : 'xMidYMid');
    frame.scrollLeft = at * gantt.clientWidth - event.offsetX;
  }, { passive: false });
}

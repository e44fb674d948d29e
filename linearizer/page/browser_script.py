"""What the browser does by itself: keep the run in the address, speak changes, take what is typed, show the focus.

Pieces of the page carry in `data-heard` what a screen reader should speak. One live region, which stays in place,
speaks it when it is new; a piece that is drawn anew every few seconds is not spoken anew.
"""

from __future__ import annotations

import json

STEPS = ("Model", "Budget", "Measure", "Train", "Result")
SPOKEN_PARTS = "note model-card budget-card other-card run-card verdict evaluating preview-note sent".split()  # by id
REMEMBER = """(memory) => {
  const here = new URL(window.location);
  memory && memory.run ? here.searchParams.set('run', memory.run) : here.searchParams.delete('run');
  window.history.replaceState(null, '', here);
  const side = document.querySelector('#sidebar');
  if (memory && memory.run && side && innerWidth > 1100 && !side.classList.contains('open'))
    side.querySelector('.toggle-button').click();
}"""
ADDRESS = "(memory) => { announce(); return [memory, window.askedRun] }"
SCRIPT = """
window.askedRun = new URL(window.location).searchParams.get('run');  // before anything changes it
function observe(part, act, mark = 'watched') {
  if (!part || part[mark]) return;
  part[mark] = true;
  act();
  const all = {childList: true, subtree: true, characterData: true, attributeFilter: ['data-heard', 'data-figure']};
  new MutationObserver(act).observe(part, all);  // what has the same shape, Gradio changes in place
}
const widths = new ResizeObserver(changes => {  // Plotly follows the window, but not the panel at its side
  for (const {target} of changes)
    if (target.offsetParent && target.clientWidth !== target.querySelector('svg')?.clientWidth)
      window.Plotly?.Plots.resize(target);
});
function completeMarkup() {  // Gradio names a place without a figure, but does not say what it is
  for (const chart of document.querySelectorAll('.js-plotly-plot')) widths.observe(chart);
  for (const place of document.querySelectorAll('.empty[aria-label]:not([role])')) place.setAttribute('role', 'img');
  for (const place of document.querySelectorAll('.cm-scroller[tabindex="-1"]')) place.tabIndex = 0;  // code scrolls
}
new MutationObserver(completeMarkup).observe(document.documentElement, {childList: true, subtree: true});
function liveRegion() {
  const heard = document.getElementById('heard') || document.createElement('div');
  if (!heard.id) document.body.append(Object.assign(heard, {id: 'heard', className: 'lz-heard', role: 'status'}));
  return heard;
}
function announce() {  // a step's parts exist once it is first shown
  const heard = liveRegion(), now = document.getElementById('now');
  for (const part of ['other-card', 'bars']) observe(document.getElementById(part), redrawBars, 'redraws');
  for (const part of spoken.map(name => document.getElementById(name)).filter(Boolean)) {
    let last = '';
    observe(part, () => {
      const text = [...part.querySelectorAll('[data-heard]')].map(one => one.dataset.heard).join(' ');
      if (text && text !== last) heard.textContent = text;
      last = text;
      if (part.id !== 'run-card') return;
      const state = [...part.querySelectorAll('.lz-now')].map(one => one.textContent).join(' \u00b7 ');
      if (now.textContent !== state) now.textContent = state;
    });
  }
}
function redrawBars() {  // Gradio would build new bars for every place of the slider
  const held = document.querySelector('#other-card [data-figure]');
  const at = document.querySelector('#bars .js-plotly-plot');
  const figure = held && held.dataset.figure;
  if (!at || !window.Plotly || (at.shown ?? null) === figure) return;
  at.own ??= {data: at.data, layout: at.layout};  // as Gradio drew them, for when the card holds no others
  at.shown = figure;
  const {data, layout} = figure ? JSON.parse(figure) : at.own;
  Plotly.react(at, data, layout, {responsive: true});
}
function clampSlider(dial, place, sent) {  // who types 64 types 6 first, which Gradio would refuse
  const range = document.querySelector(`#${dial} input[type=range]`);
  if (range) sent[place] = Math.min(Math.max(sent[place], range.min), range.max);
  return sent;
}
function takeTyped(event) {  // Gradio's Enter would take the first suggestion before an arrow key has chosen any
  const field = event.target, box = field.closest?.('#model');
  if (!box) return;
  const arrow = ['ArrowUp', 'ArrowDown'].includes(event.key), chosen = 'chosen' in box.dataset;
  if (arrow) box.dataset.chosen = '';
  else if (event.key !== 'Enter') delete box.dataset.chosen;
  if (chosen || !(arrow ? box.querySelector('li.active') : event.key === 'Enter')) return;
  event.stopPropagation();
  if (!arrow) field.blur();  // which takes what the field says
}
document.addEventListener('keydown', takeTyped, true);
function focusStep(step, tries = 100) {
  setTimeout(() => {
    const title = document.querySelector(`#step-${step} h2`), at = document.activeElement;
    if (!title || !title.offsetParent) return tries && focusStep(step, tries - 1);
    announce();
    if (at && at !== document.body && at.offsetParent) return;
    title.tabIndex = -1;  // the button that was pressed is gone: go on at the top of the new step
    title.focus();
  }, 50);
  return step;
}
"""
HEAD = f"<script>const spoken = {json.dumps(SPOKEN_PARTS)};{SCRIPT}</script>"

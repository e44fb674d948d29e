"""What the browser does by itself: remembers the run in the address, says aloud what changes, keeps the focus in sight.

Pieces of the page carry in `data-heard` what a listener should hear of them. One live region, which stays in place,
says it when it is new: what is drawn anew every few seconds is not said anew.
"""

from __future__ import annotations

import json

STEPS = ("Model", "Budget", "Profile", "Distil", "Compare & publish")
# parts that speak
SPOKEN_PARTS = ("note", "model-card", "budget-card", "other-card", "run-card", "evaluating", "preview-note", "sent")
REMEMBER = """(memory) => {
  const here = new URL(window.location);
  memory && memory.run ? here.searchParams.set('run', memory.run) : here.searchParams.delete('run');
  window.history.replaceState(null, '', here);
  const side = document.querySelector('#sidebar');
  if (memory && memory.run && side && innerWidth > 1100 && !side.classList.contains('open'))
    side.querySelector('.toggle-button').click();
}"""
ADDRESS = "(memory) => { listen(); return [memory, window.asked] }"
SCRIPT = """
window.asked = new URL(window.location).searchParams.get('run');  // before anything changes it
function watch(part, act, mark = 'watched') {
  if (!part || part[mark]) return;
  part[mark] = true;
  act();
  const all = {childList: true, subtree: true, characterData: true, attributeFilter: ['data-heard', 'data-figure']};
  new MutationObserver(act).observe(part, all);  // what has the same shape, Gradio changes in place
}
function name() {  // Gradio names a place without a figure, but does not say what it is
  for (const place of document.querySelectorAll('.empty[aria-label]:not([role])')) place.setAttribute('role', 'img');
}
new MutationObserver(name).observe(document.documentElement, {childList: true, subtree: true});
function region() {
  const heard = document.getElementById('heard') || document.createElement('div');
  if (!heard.id) document.body.append(Object.assign(heard, {id: 'heard', className: 'lz-heard', role: 'status'}));
  return heard;
}
function hear() {  // a step's parts come into being when it is first shown
  const heard = region(), now = document.getElementById('now');
  for (const part of ['other-card', 'bars']) watch(document.getElementById(part), redraw, 'redraws');
  for (const part of told.map(name => document.getElementById(name)).filter(Boolean)) {
    let last = '';
    watch(part, () => {
      const text = [...part.querySelectorAll('[data-heard]')].map(one => one.dataset.heard).join(' ');
      if (text && text !== last) heard.textContent = text;
      last = text;
      if (part.id !== 'run-card') return;
      const state = [...part.querySelectorAll('.lz-now')].map(one => one.textContent).join(' \u00b7 ');
      if (now.textContent !== state) now.textContent = state;
    });
  }
}
function redraw() {  // Gradio would take the bars down and build new ones for every place of the slider
  const held = document.querySelector('#other-card [data-figure]');
  const at = document.querySelector('#bars .js-plotly-plot');
  const figure = held && held.dataset.figure;
  if (!at || !window.Plotly || (at.shown ?? null) === figure) return;
  at.own ??= {data: at.data, layout: at.layout};  // as Gradio drew them, for when the card holds no others
  at.shown = figure;
  const {data, layout} = figure ? JSON.parse(figure) : at.own;
  Plotly.react(at, data, layout, {responsive: true});
}
function listen() {
  const stepper = document.querySelector('#steps .stepper-wrapper');
  hear();
  watch(stepper, () => stepper.querySelectorAll('[role=tab]').forEach((tab, n) => {
    const name = `${n + 1} ${steps[n]}`;
    if (tab.ariaLabel !== name) tab.ariaLabel = name;
  }));
}
function within(dial, place, sent) {  // on the way to 64 stands a 6, which Gradio would refuse
  const range = document.querySelector(`#${dial} input[type=range]`);
  if (range) sent[place] = Math.min(Math.max(sent[place], range.min), range.max);
  return sent;
}
function turned(step, tries = 100) {
  setTimeout(() => {
    const title = document.querySelector(`#step-${step} h2`), at = document.activeElement;
    if (!title || !title.offsetParent) return tries && turned(step, tries - 1);
    hear();
    if (at && at !== document.body && at.offsetParent) return;
    title.tabIndex = -1;  // what was pressed is gone with its page: go on at the top of the new one
    title.focus();
  }, 50);
  return step;
}
"""
HEAD = f"<script>const steps = {json.dumps(STEPS)}, told = {json.dumps(SPOKEN_PARTS)};{SCRIPT}</script>"

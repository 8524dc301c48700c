"""Checks of the layout and accessibility of a page in a browser."""

from __future__ import annotations

from tests.browser import Browser

CONTRAST = """
(() => {
  const numbers = color => (color.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ratio = (a, b) => { const [low, high] = [light(a), light(b)].sort((x, y) => x - y); return (high + .05) / (low + .05) };
  const ground = e => { for (; e; e = e.parentElement) {
    const color = numbers(getComputedStyle(e).backgroundColor); if (color.length < 4 || color[3] > 0) return color }
    return [255, 255, 255] };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || ['TITLE', 'STYLE'].includes(e.tagName.toUpperCase())) continue;
    const style = getComputedStyle(e), ink = numbers(e.closest('svg') ? style.fill : style.color);
    if (ratio(ink, ground(e)) < 4.5) found.push([walker.currentNode.data, ratio(ink, ground(e))]);
  }
  for (const [shapes, property] of [['.mark use', 'fill'], ['.line path', 'stroke']])
    for (const shape of document.querySelectorAll(`svg :is(${shapes})`)) {
      const style = getComputedStyle(shape), under = ground(shape), share = Number(style.opacity);
      const colour = numbers(style[property]).map((v, i) => share * v + (1 - share) * under[i]);
      if (ratio(colour, under) < 3) found.push([shape.outerHTML, ratio(colour, under)]);
    }
  return found;
})()
"""
OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap(chart => {
  const words = [...chart.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top + 4 < b.bottom && b.top + 4 < a.bottom;
  return words.flatMap(([one, a], i) => words.slice(0, i).filter(([_, b]) => meet(a, b)).map(([other]) => [one, other]));
})
"""
SMALL = """
[...document.querySelectorAll('svg text')]
  .map(t => [parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a, t.textContent]).filter(([pixels]) => pixels < 12)
"""
HEADINGS = """
[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))
  .filter((level, i, all) => i === 0 ? level !== 1 : level === 1 || level > all[i - 1] + 1)
"""
TABLES = """
[...document.querySelectorAll('table')]
  .filter(t => !t.caption?.innerText.trim() || [...t.querySelectorAll('th')].some(h => !h.scope)).map(t => t.innerText)
"""
WORDLESS = """
[...document.querySelectorAll('svg, img')]
  .filter(p => !p.closest('[role=img][aria-label], [aria-hidden=true]')).map(p => p.outerHTML)
"""
UNREACHED = """
[...document.querySelectorAll('body *')]
  .filter(e => e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1)
  .filter(e => /auto|scroll/.test(getComputedStyle(e).overflow) && (e.tabIndex < 0 || !e.ariaLabel)).map(e => e.outerHTML)
"""
MOVING = """
[...document.querySelectorAll('*')].filter(e => (style =>
  style.transitionDuration !== '0s' || style.animationName !== 'none' || style.scrollBehavior !== 'auto')(getComputedStyle(e)))
  .map(e => e.outerHTML)
"""
OUTSIDE = "[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().right > {width}).map(s => s.outerHTML)"
PROBES = {
    "contrast below 4.5 (text) or 3 (marks and lines)": CONTRAST,
    "overlapping texts of a chart": OVERLAPS,
    "texts of a chart smaller than 12 pixels": SMALL,
    "skipped heading levels": HEADINGS,
    "tables without a caption or scopes": TABLES,
    "pictures without a description": WORDLESS,
    "scrolling areas without keyboard access or a name": UNREACHED,
    "animations": MOVING,
}


def faults(page: Browser, width: int) -> dict[str, object]:
    """The problems of the page in a window of this width with all details open."""
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = {problem: page.evaluate(probe) for problem, probe in PROBES.items()}
    found["outside of the window"] = page.evaluate(OUTSIDE.format(width=width))
    found["width"] = [wide] if (wide := page.evaluate("document.documentElement.scrollWidth")) > width else []
    return {problem: places for problem, places in found.items() if places}

// Plots of samples, as SVG: small ones for rows of a list, and larger ones with axes.
//
// A plot is a picture for those who see it; its newest value is text beside it, which screen readers read. Samples come from
// elsewhere: values that are no numbers are left out, and no plot has more than `POINTS` points.

import { clockText } from './ui.js'
import { make } from './text.js'

const SVG = 'http://www.w3.org/2000/svg'
export const POINTS = 600

function shape(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag)
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
  element.append(...children)
  return element
}

/** A small line without axes; `push` adds a value between 0 and 1. */
export function spark(label, length = 40) {
  const width = 72
  const height = 20
  const line = shape('polyline', { class: 'plot-line' })
  const element = shape('svg', { class: 'spark', viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true', focusable: 'false' }, line)
  const values = []
  return {
    element,
    label,
    push(value) {
      values.push(Math.min(Math.max(Number(value) || 0, 0), 1))
      if (values.length > length) values.shift()
      const shown = values.length === 1 ? [values[0], values[0]] : values
      const step = (width - 2) / (length - 1)
      const begin = width - 1 - (shown.length - 1) * step
      line.setAttribute('points', shown.map((one, at) => `${(begin + at * step).toFixed(1)},${(height - 1 - one * (height - 2)).toFixed(1)}`).join(' '))
    },
  }
}

/** Fewer points: the largest of each group, because peaks are what is looked for. */
function thinned(points) {
  if (points.length <= POINTS) return points
  const size = Math.ceil(points.length / POINTS)
  const out = []
  for (let at = 0; at < points.length; at += size) {
    out.push(points.slice(at, at + size).reduce((one, other) => (other[1] > one[1] ? other : one)))
  }
  return out
}

/**
 * A plot with a title, axes and the newest value. `draw(series, range)` shows series `{ points: [[ms, value]] }` of the times
 * `range`; `text` makes text of a value, `top(largest)` the upper end of the axis.
 */
export function plot(title, { names = [''], text, top = (largest) => largest || 1 }) {
  const width = 480
  const height = 140
  const left = 8
  const bottom = 18
  const box = shape('svg', { class: 'plot-picture', viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: 'none', 'aria-hidden': 'true', focusable: 'false' })
  const value = make('span', { className: 'plot-value', textContent: '–' })
  const upper = make('span', { className: 'plot-upper' })
  const from = make('span')
  const to = make('span')
  const element = make(
    'figure',
    { className: 'plot' },
    make('figcaption', {}, make('span', { className: 'plot-title', textContent: title }), value),
    make('div', { className: 'plot-box' }, box, upper),
    make('div', { className: 'plot-times', 'aria-hidden': 'true' }, from, to),
  )
  return {
    element,
    draw(series, range) {
      const clean = series.map((points) => thinned(points.filter(([at, one]) => Number.isFinite(at) && Number.isFinite(one))))
      const largest = Math.max(0, ...clean.flat().map(([, one]) => one))
      const limit = Math.max(top(largest), 1e-9)
      const [begin, end] = range
      const x = (at) => left + ((at - begin) / Math.max(end - begin, 1)) * (width - 2 * left)
      const y = (one) => 6 + (1 - Math.min(one / limit, 1)) * (height - bottom - 6)
      const lines = [0, 0.5, 1].map((part) => shape('line', { class: 'plot-grid', x1: left, x2: width - left, y1: y(limit * part), y2: y(limit * part) }))
      const drawn = clean.flatMap((points, at) => {
        if (!points.length) return []
        const list = points.map(([time, one]) => `${x(time).toFixed(1)},${y(one).toFixed(1)}`)
        const line = shape('polyline', { class: `plot-line is-${at}`, points: list.join(' ') })
        if (at) return [line]
        const area = `${x(points[0][0]).toFixed(1)},${y(0)} ${list.join(' ')} ${x(points.at(-1)[0]).toFixed(1)},${y(0)}`
        return [shape('polygon', { class: 'plot-area', points: area }), line]
      })
      box.replaceChildren(...lines, ...drawn)
      const latest = clean.map((points, at) => (points.length ? `${names[at] ? `${names[at]} ` : ''}${text(points.at(-1)[1])}` : '')).filter(Boolean)
      value.textContent = latest.join(', ') || 'no samples'
      upper.textContent = clean.some((points) => points.length) ? text(limit) : ''
      from.textContent = clockText(begin)
      to.textContent = clockText(end)
    },
  }
}

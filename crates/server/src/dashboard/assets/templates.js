// Templates that the team can use, and the snapshots that it has made.

import { change, encoded, isAborted, items, path, reason, send, withQuery } from './api.js'
import { buildTemplate } from './build.js'
import { createSandbox } from './create.js'
import { button, bytes, confirm, field, input, link, make, nameElement, note, number, poll, row, setText, shown, stateElement, table, timeElement } from './ui.js'

const PAGE = 100
const ROWS_MAX = 1000
const EVERY_MS = 10_000

/** A list in pages: what the API has of it, up to `ROWS_MAX`, with a button for more. */
function paged(root, context, { caption, columns, read, draw, none }) {
  const status = make('p', { className: 'state-line', textContent: 'Reading …' })
  const { element, body } = table(caption, columns)
  element.hidden = true
  const more = button('Load more', () => load(false), { hidden: true })
  root.append(status, element, make('div', { className: 'buttons' }, more))
  let token = ''
  let drawn = ''
  async function load(isFirst) {
    more.disabled = true
    try {
      const { value, headers } = await send('GET', read(isFirst ? '' : token), { signal: context.signal })
      const list = items(value, PAGE)
      token = headers.get('x-next-token') ?? ''
      const text = JSON.stringify(list)
      if (isFirst && text === drawn) return
      if (isFirst) drawn = text
      const focused = document.activeElement?.dataset?.key
      if (isFirst) body.replaceChildren()
      body.append(...list.map(draw))
      if (focused) body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus()
      const count = body.childElementCount
      element.hidden = count === 0
      more.hidden = !token || count >= ROWS_MAX
      setText(status, count ? `${count} shown${token ? (more.hidden ? '; there are more, which the API lists' : '; there are more') : ''}.` : none)
    } catch (error) {
      if (!isAborted(error)) setText(status, `${element.hidden ? 'Not read' : 'Not current'}: ${reason(error)}.`)
      throw error
    } finally {
      more.disabled = false
    }
  }
  // Further pages are not read again by themselves, and would be lost by a new first one.
  return { refresh: poll(context.signal, EVERY_MS, () => (body.childElementCount > PAGE ? undefined : load(true))), reload: () => load(true).catch(() => {}) }
}

export async function mount(root, context) {
  const search = input({ name: 'name', maxLength: 200, placeholder: 'name or id' })
  const problem = make('p', { className: 'error', role: 'alert' })
  const snapshots = make('div')
  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Templates' }), make('div', { className: 'buttons' }, button('Build template', () => buildTemplate(context)))),
    make(
      'form',
      {
        className: 'bar',
        'aria-label': 'Open a template',
        onsubmit: async (event) => {
          event.preventDefault()
          const name = search.value.trim()
          if (!name) return
          problem.textContent = ''
          try {
            const { value } = await send('GET', `api/templates/aliases/${encoded(name)}`, { signal: context.signal })
            context.go(`/dashboard/templates/${encoded(value?.templateID ?? name)}`)
          } catch (error) {
            if (isAborted(error)) return
            if (error.status === 404 || error.status === 400) context.go(`/dashboard/templates/${encoded(name)}`)
            else problem.textContent = `Not opened: ${reason(error)}.`
          }
        },
      },
      field('Open by name', search),
      make('button', { type: 'submit', textContent: 'Open' }),
    ),
    problem,
    note('Templates are built here, with an SDK, the command line or the API; a build that runs is seen here with its log.'),
  )
  paged(root, context, {
    caption: 'Templates',
    columns: ['Template', 'Build', ['CPU', 'right'], ['Memory', 'right'], ['Disk', 'right'], ['Created from it', 'right'], 'Updated', ['', 'narrow']],
    read: (nextToken) => withQuery('api/v2/templates', { limit: PAGE, nextToken }),
    none: 'There are no templates.',
    draw: (one) => {
      const id = String(one.templateID)
      const names = (Array.isArray(one.names) ? one.names : []).slice(0, 3).map((name) => shown(name, 100))
      const title = link(`/dashboard/templates/${encoded(id)}`, names.join(', ') || shown(id, 80))
      title.dataset.key = `open ${shown(id)}`
      const create = button('Create sandbox', () => createSandbox(context, id), { className: 'small', 'aria-label': `Create sandbox from ${names[0] ?? shown(id, 80)}`, disabled: one.buildStatus !== 'ready' })
      create.dataset.key = `create ${shown(id)}`
      return row(
        make('span', {}, title, make('span', { className: 'id', textContent: `${shown(id, 80)}${one.isDefault ? ', of the platform' : one.public ? ', public' : ''}` })),
        stateElement(one.buildStatus),
        [String(number(one.cpuCount)), 'right'],
        [bytes(number(one.memoryMB) * 1024 * 1024), 'right'],
        [bytes(number(one.diskSizeMB) * 1024 * 1024), 'right'],
        [String(number(one.spawnCount)), 'right'],
        timeElement(one.updatedAt),
        [create, 'narrow'],
      )
    },
  })
  root.append(make('h2', { textContent: 'Snapshots' }), snapshots)
  const list = paged(snapshots, context, {
    caption: 'Snapshots',
    columns: ['Snapshot', 'Names', ['', 'narrow']],
    read: (nextToken) => withQuery('api/snapshots', { limit: PAGE, nextToken }),
    none: 'There are no snapshots.',
    draw: (one) => {
      const id = String(one.snapshotID)
      const names = (Array.isArray(one.names) ? one.names : []).slice(0, 5)
      return row(
        make('code', { textContent: shown(id, 100) }),
        nameElement(names.join(', '), 300),
        [
          make(
            'div',
            { className: 'buttons' },
            button('Create sandbox', () => createSandbox(context, id), { className: 'small', 'aria-label': `Create sandbox from the snapshot ${shown(id, 100)}` }),
            button('Delete', () => remove(id), { className: 'is-danger small', 'aria-label': `Delete the snapshot ${shown(id, 100)}` }),
          ),
          'narrow',
        ],
      )
    },
  })
  async function remove(id) {
    if (!(await confirm('Delete this snapshot?', [nameElement(id, 100), ': sandboxes that were created from it stay.'], 'Delete', () => change('DELETE', path('snapshots', id))))) return
    context.say('The snapshot was deleted.')
    await list.reload()
  }
}

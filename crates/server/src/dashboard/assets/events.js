// What happened to the sandboxes of the team, and the webhooks that are told of it, with the attempts to reach them.

import { change, encoded, get, isAborted, items, path, reason, withQuery } from './api.js'
import { button, check, confirm, dialog, field, fill, input, Invalid, link, make, metadataElement, moment, nameElement, note, number, poll, row, select, setText, shown, stateElement, table, timeElement, trouble } from './ui.js'

const PAGE = 50
const EVENTS_MS = 3000
const HOOKS_MS = 10_000
const ROWS_MAX = 200
const TYPES = ['created', 'updated', 'paused', 'resumed', 'checkpointed', 'killed']
const typeOf = (name) => `sandbox.lifecycle.${name}`

export async function mount(root, context) {
  const [first, id] = context.parts
  if (first === 'webhooks' && id) {
    mountHook(root, context, id)
    return
  }
  const type = select([['', 'All'], ...TYPES.map((name) => [typeOf(name), name])], '')
  const sandbox = input({ maxLength: 80, placeholder: 'id' })
  const status = make('p', { className: 'state-line', textContent: 'Reading …' })
  const { element, body } = table('Events', ['Event', 'Sandbox', 'When', 'Metadata'])
  const newer = button('Newer', () => turn(-1), { disabled: true })
  const older = button('Older', () => turn(1), { disabled: true })
  const hooks = make('div')
  element.hidden = true
  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Events' })),
    make(
      'form',
      {
        className: 'bar',
        'aria-label': 'Filter events',
        onsubmit: (event) => {
          event.preventDefault()
          turn(0)
        },
      },
      field('Type', type),
      field('Sandbox', sandbox),
      make('button', { type: 'submit', textContent: 'Filter' }),
    ),
    status,
    element,
    make('div', { className: 'buttons' }, newer, older),
    make('div', { className: 'head section' }, make('h2', { textContent: 'Webhooks' }), make('div', { className: 'buttons' }, button('New webhook', () => editHook(context, null, refreshHooks)))),
    hooks,
  )
  type.addEventListener('change', () => turn(0))
  let offset = 0
  let drawn = null
  function turn(by) {
    offset = by ? Math.max(0, offset + by * PAGE) : 0
    drawn = null
    refresh()
  }
  const refresh = poll(context.signal, EVENTS_MS, async () => {
    try {
      const where = sandbox.value.trim() ? path('events', 'sandboxes', sandbox.value.trim()) : 'events/sandboxes'
      const all = items(await get(withQuery(where, { limit: PAGE, offset, types: type.value }), { signal: context.signal }), PAGE)
      newer.disabled = offset === 0
      older.disabled = all.length < PAGE
      const text = JSON.stringify(all)
      if (text === drawn) return
      drawn = text
      element.hidden = all.length === 0
      setText(status, all.length ? `${offset + 1} to ${offset + all.length}, the newest first.` : 'There are no events. They are kept for seven days.')
      const focused = document.activeElement?.dataset?.key
      body.replaceChildren(
        ...all.map((one) => {
          const where_ = link(`/dashboard/sandboxes/${encoded(one.sandboxId)}`, shown(one.sandboxId, 60))
          where_.dataset.key = shown(one.id, 60)
          return row(nameElement(one.eventLabel || one.type, 60), where_, timeElement(one.timestamp), metadataElement(one.eventData?.sandbox_metadata))
        }),
      )
      if (focused) [...body.querySelectorAll('a')].find((one) => one.dataset.key === focused)?.focus()
    } catch (error) {
      if (!isAborted(error)) setText(status, `${drawn === null ? 'Not read' : 'Not current'}: ${reason(error)}.`)
      throw error
    }
  })

  let seen = null
  const refreshHooks = poll(context.signal, HOOKS_MS, async () => {
    try {
      const all = items(await get('events/webhooks', { signal: context.signal }), ROWS_MAX)
      const text = JSON.stringify(all)
      if (text === seen) return
      seen = text
      if (!all.length) {
        hooks.replaceChildren(note('There are no webhooks.'))
        return
      }
      const list = table('Webhooks', ['Webhook', 'Address', 'Events', 'State', ['Dropped', 'right']], all.map((one) =>
        row(
          link(`/dashboard/events/webhooks/${encoded(one.id)}`, shown(one.name, 64)),
          nameElement(one.url, 200),
          eventsText(one.events),
          one.enabled ? 'on' : 'off',
          [String(number(one.droppedEvents)), 'right'],
        ),
      ))
      hooks.replaceChildren(list.element)
    } catch (error) {
      if (!isAborted(error) && seen === null) hooks.replaceChildren(trouble(error, () => refreshHooks()))
      throw error
    }
  })
}

function eventsText(events) {
  const names = (Array.isArray(events) ? events : []).slice(0, 20).map((name) => shown(String(name).replace('sandbox.lifecycle.', ''), 40))
  return names.length === TYPES.length ? 'all' : names.join(', ')
}

/** Creates or changes a webhook. */
async function editHook(context, hook, after) {
  const name = input({ required: true, maxLength: 64, value: typeof hook?.name === 'string' ? hook.name : '' })
  const url = input({ type: 'url', required: true, maxLength: 2048, value: typeof hook?.url === 'string' ? hook.url : '' })
  const secret = input({ type: 'password', autocomplete: 'new-password', required: !hook, maxLength: 256 })
  const boxes = TYPES.map((type) => [type, check(type, !hook || (Array.isArray(hook.events) && hook.events.includes(typeOf(type))))])
  const enabled = check('Send events', hook?.enabled ?? true)
  const isDone = await dialog({
    title: hook ? 'Change the webhook' : 'New webhook',
    content: [
      field('Name', name),
      field('Address', url, 'An HTTPS address that the platform reaches.'),
      field('Secret of the signature', secret, hook ? 'Empty: it stays as it is.' : 'It signs each event, and is not shown again.'),
      make('fieldset', {}, make('legend', { textContent: 'Events' }), ...boxes.map(([, box]) => box.element)),
      enabled.element,
    ],
    action: hook ? 'Change' : 'Create',
    act: async () => {
      const events = boxes.filter(([, box]) => box.control.checked).map(([type]) => typeOf(type))
      if (!events.length) throw new Invalid('One kind of events at least is required.')
      const body = { name: name.value.trim(), url: url.value.trim(), events, enabled: enabled.control.checked }
      if (secret.value) body.signatureSecret = secret.value
      await (hook ? change('PATCH', path('events', 'webhooks', hook.id), body) : change('POST', 'events/webhooks', body))
      return true
    },
  })
  secret.value = ''
  if (isDone) context.say(hook ? 'The webhook was changed.' : 'The webhook was created.')
  after()
}

/** One webhook with its deliveries. */
function mountHook(root, context, id) {
  const api = path('events', 'webhooks', id)
  const heading = make('h1', { tabIndex: -1, textContent: 'Webhook' })
  const about = make('div')
  const problem = make('div')
  const edit = button('Change', () => hook && editHook(context, hook, () => refresh()), { disabled: true })
  const remove = button('Delete', onDelete, { className: 'is-danger', disabled: true })
  const status = make('p', { className: 'state-line' })
  const { element, body } = table('Deliveries', ['Event', 'Result', ['Attempt', 'right'], ['Took', 'right'], 'When', 'Next attempt', 'Error'])
  const newer = button('Newer', () => turn(-1), { disabled: true })
  const older = button('Older', () => turn(1), { disabled: true })
  let hook = null
  let offset = 0
  let drawn = null
  root.append(
    make('p', { className: 'way' }, link('/dashboard/events', 'Events')),
    make('div', { className: 'head' }, heading, make('div', { className: 'buttons' }, edit, remove)),
    problem,
    about,
    make('h2', { textContent: 'Deliveries' }),
    status,
    element,
    make('div', { className: 'buttons' }, newer, older),
  )
  function turn(by) {
    offset = Math.max(0, offset + by * PAGE)
    drawn = null
    refresh()
  }
  const refresh = poll(context.signal, EVENTS_MS, async () => {
    try {
      hook = await get(api, { signal: context.signal })
      const all = items(await get(withQuery(`${api}/deliveries`, { limit: PAGE, offset }), { signal: context.signal }), PAGE)
      problem.replaceChildren()
      edit.disabled = remove.disabled = false
      newer.disabled = offset === 0
      older.disabled = all.length < PAGE
      const text = JSON.stringify([hook, all])
      if (text === drawn) return
      drawn = text
      heading.replaceChildren(nameElement(hook.name, 64))
      fill(about, make('p', {}, nameElement(hook.url, 300), ` – ${eventsText(hook.events)}, ${hook.enabled ? 'on' : 'off'}, ${number(hook.droppedEvents)} dropped`))
      setText(status, all.length ? `${offset + 1} to ${offset + all.length}, the newest first.` : 'Nothing was sent yet.')
      element.hidden = all.length === 0
      body.replaceChildren(
        ...all.map((one) => {
          const isDelivered = number(one.status) >= 200 && number(one.status) < 300
          return row(
            nameElement(String(one.type).replace('sandbox.lifecycle.', ''), 60),
            make('span', {}, stateElement(isDelivered ? 'delivered' : 'failed'), one.status ? ` ${number(one.status)}` : ''),
            [String(number(one.attempt)), 'right'],
            [`${number(one.durationMs)} ms`, 'right'],
            timeElement(one.timestamp),
            one.nextAttemptAt ? moment(one.nextAttemptAt) : '–',
            nameElement(one.error ?? '', 300),
          )
        }),
      )
    } catch (error) {
      if (isAborted(error)) throw error
      problem.replaceChildren(error.status === 404 ? note('There is no such webhook.') : note(`Not current: ${reason(error)}.`, 'is-bad'))
      throw error
    }
  })
  async function onDelete() {
    if (!(await confirm('Delete this webhook?', [nameElement(hook.name, 64), ': events that wait for it are dropped.'], 'Delete', () => change('DELETE', api)))) return
    context.say('The webhook was deleted.')
    context.go('/dashboard/events')
  }
}

// The dialog that creates a sandbox from a template.

import { change, encoded, get, items, send, withQuery } from './api.js'
import { check, dialog, field, input, Invalid, make, pairsOf, select, wordsOf } from './ui.js'

// Suggestions of templates; any other can be typed.
const SUGGESTED_MAX = 200

/** The body of the request for what was filled in, without a page. */
export function requestOf(given) {
  const body = { templateID: given.template.trim() }
  if (!body.templateID) throw new Invalid('A template is required.')
  const timeout = Number(given.timeout)
  if (!Number.isInteger(timeout) || timeout < 1) throw new Invalid('The timeout must be a whole number of seconds.')
  body.timeout = timeout
  const metadata = pairsOf(given.metadata, 'Metadata')
  if (Object.keys(metadata).length) body.metadata = metadata
  const envVars = pairsOf(given.environment, 'Environment')
  if (Object.keys(envVars).length) body.envVars = envVars
  const allowOut = wordsOf(given.allow)
  const denyOut = wordsOf(given.deny)
  const network = {}
  if (allowOut.length) network.allowOut = allowOut
  if (denyOut.length) network.denyOut = denyOut
  if (given.isPrivate) network.allowPublicTraffic = false
  if (Object.keys(network).length) body.network = network
  if (given.access === 'closed') body.allow_internet_access = false
  if (given.atEnd === 'pause') body.autoPause = true
  return body
}

/** Asks what to create, and goes to the sandbox. */
export async function createSandbox(context, template = '') {
  const list = make('datalist', { id: 'templates' })
  const templateField = input({ name: 'template', required: true, maxLength: 200, value: template || 'base' })
  templateField.setAttribute('list', 'templates')
  const timeout = input({ type: 'number', name: 'timeout', min: '1', max: '2147483647', required: true, value: '300' })
  const atEnd = select([['kill', 'Kill it'], ['pause', 'Pause it']], 'kill', { name: 'at-end' })
  const metadata = make('textarea', { name: 'metadata', maxLength: 20_000, spellcheck: false, placeholder: 'purpose=review' })
  const environment = make('textarea', { name: 'environment', maxLength: 100_000, spellcheck: false, placeholder: 'LOG_LEVEL=debug' })
  const access = select([['open', 'Open, as the platform allows'], ['closed', 'Closed, except what is allowed below']], 'open', { name: 'access' })
  const allow = input({ name: 'allow', maxLength: 20_000, placeholder: 'example.com, 203.0.113.0/24' })
  const deny = input({ name: 'deny', maxLength: 20_000, placeholder: '198.51.100.0/24' })
  const isPrivate = check('Its ports need the traffic token', false, { name: 'private' })
  // Suggestions come when they come; what is typed needs none.
  get(withQuery('v2/templates', { limit: 100 }), { signal: context.signal })
    .then((value) => {
      for (const one of items(value, SUGGESTED_MAX)) {
        const names = Array.isArray(one.names) ? one.names : []
        list.append(make('option', { value: String(names[0] ?? one.templateID).slice(0, 200) }))
      }
    })
    .catch(() => {})
  // The same request twice, after an answer that was lost, makes one sandbox.
  const key = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`
  let sent = ''
  const made = await dialog({
    title: 'Create a sandbox',
    action: 'Create',
    isWide: true,
    content: [
      list,
      field('Template', templateField, 'Its name, with a tag if one is meant, or its id.'),
      make('div', { className: 'bar' }, field('Timeout in seconds', timeout), field('At its end', atEnd)),
      field('Metadata', metadata, 'Lines name=value, by which lists are filtered.'),
      field('Environment variables', environment, 'Lines NAME=value, for all of its processes.'),
      make(
        'fieldset',
        {},
        make('legend', { textContent: 'Network' }),
        field('Internet access', access),
        field('Allowed', allow, 'Domains, addresses and networks, with commas between them. Domains need closed access.'),
        field('Denied', deny, 'Addresses and networks.'),
        isPrivate.element,
      ),
    ],
    act: async (progress) => {
      const body = requestOf({
        template: templateField.value,
        timeout: timeout.value,
        atEnd: atEnd.value,
        metadata: metadata.value,
        environment: environment.value,
        access: access.value,
        allow: allow.value,
        deny: deny.value,
        isPrivate: isPrivate.control.checked,
      })
      progress('Creating …')
      sent ||= JSON.stringify(body)
      const isSame = sent === JSON.stringify(body)
      const { value } = await send('POST', 'api/v2/sandboxes', { body, headers: isSame ? { 'Idempotency-Key': key } : {} })
      return value
    },
  })
  if (!made || typeof made.sandboxID !== 'string') return
  context.say('The sandbox was created.')
  context.go(`/dashboard/sandboxes/${encoded(made.sandboxID)}`)
}

/** Ends a sandbox. */
export function kill(id) {
  return change('DELETE', `sandboxes/${encoded(id)}`)
}

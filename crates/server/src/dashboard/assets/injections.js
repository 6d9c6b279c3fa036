// Rules of injection and secrets. Values can be written here, and never be read: the API does not return them.

import { change, get, isAborted, items, path, reason, send, withQuery } from './api.js'
import { button, confirm, dialog, field, input, Invalid, make, nameElement, note, pairsOf, poll, row, select, setText, shown, table, timeElement } from './ui.js'

const EVERY_MS = 10_000
const ROWS_MAX = 500
const KINDS = [
  ['http', 'Headers of requests to an address'],
  ['openai', 'OpenAI'],
  ['anthropic', 'Anthropic'],
  ['gemini', 'Gemini'],
  ['qiniu', 'Qiniu'],
  ['sufy', 'Sufy'],
  ['github', 'GitHub'],
]

/** The injection of what was filled in, without a page. */
export function injectionOf({ kind, address, headers, secret }) {
  const injection = { type: kind }
  if (address.trim()) injection.base_url = address.trim()
  if (kind === 'http') {
    if (!injection.base_url) throw new Invalid('An address is required.')
    injection.headers = pairsOf(headers, 'Headers')
    if (!Object.keys(injection.headers).length) throw new Invalid('A header is required.')
    return injection
  }
  if (!secret) throw new Invalid('A key or token is required.')
  injection[kind === 'github' ? 'token' : 'api_key'] = secret
  return injection
}

function listing(root, context, { caption, columns, read, draw, none }) {
  const status = make('p', { className: 'state-line', textContent: 'Reading …' })
  const { element, body } = table(caption, columns)
  element.hidden = true
  root.append(status, element)
  let drawn = null
  return poll(context.signal, EVERY_MS, async () => {
    try {
      const all = items(await read(), 100_000)
      const text = JSON.stringify(all)
      if (text === drawn) return
      drawn = text
      body.replaceChildren(...all.slice(0, ROWS_MAX).map(draw))
      element.hidden = all.length === 0
      setText(status, all.length ? `${all.length}${all.length > ROWS_MAX ? `, ${ROWS_MAX} are shown` : ''}.` : none)
    } catch (error) {
      if (!isAborted(error)) setText(status, `${drawn === null ? 'Not read' : 'Not current'}: ${reason(error)}.`)
      throw error
    }
  })
}

const secretInput = (properties) => input({ type: 'password', autocomplete: 'new-password', ...properties })

export async function mount(root, context) {
  const rules = make('div')
  const secrets = make('div')
  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Injections' }), make('div', { className: 'buttons' }, button('New rule', () => editRule(), { className: 'is-main' }))),
    note('A rule sets headers on HTTPS requests of the sandboxes that name it. The sandbox never sees the values, and neither does this page: they can only be replaced.'),
    rules,
    make('div', { className: 'head section' }, make('h2', { textContent: 'Secrets' }), make('div', { className: 'buttons' }, button('New secret', newSecret))),
    secrets,
  )
  const refreshRules = listing(rules, context, {
    caption: 'Injection rules',
    columns: ['Rule', 'Kind', 'Requests to', 'Headers', 'Changed', ['', 'narrow']],
    none: 'There are no rules.',
    read: () => get('injection-rules', { signal: context.signal }),
    draw: (one) => {
      const injection = one.injection ?? {}
      const name = shown(one.name, 100)
      return row(
        make('span', {}, nameElement(one.name, 100), make('span', { className: 'id', textContent: shown(one.ruleID, 60) })),
        nameElement(injection.type, 40),
        nameElement(injection.base_url ?? 'the host of the provider', 200),
        nameElement(Object.keys(injection.headers ?? {}).slice(0, 20).join(', ') || '–', 300),
        timeElement(one.updatedAt),
        [
          make(
            'div',
            { className: 'buttons' },
            button('Replace', () => editRule(one), { className: 'small', 'aria-label': `Replace the rule ${name}` }),
            button('Delete', () => removeRule(one), { className: 'is-danger small', 'aria-label': `Delete the rule ${name}` }),
          ),
          'narrow',
        ],
      )
    },
  })
  const refreshSecrets = listing(secrets, context, {
    caption: 'Secrets',
    columns: ['Name', ['Version', 'right'], 'Changed', ['', 'narrow']],
    none: 'There are no secrets.',
    read: async () => {
      const all = []
      let nextToken = ''
      do {
        const { value, headers } = await send('GET', withQuery('api/secrets', { limit: 100, nextToken }), { signal: context.signal })
        all.push(...items(value, 100))
        nextToken = headers.get('x-next-token') ?? ''
      } while (nextToken && all.length < ROWS_MAX)
      return all
    },
    draw: (one) => {
      const name = shown(one.name, 128)
      return row(
        nameElement(one.name, 128),
        [shown(one.currentVersion, 20), 'right'],
        timeElement(one.updatedAt),
        [
          make(
            'div',
            { className: 'buttons' },
            button('Set value', () => setSecret(one), { className: 'small', 'aria-label': `Set value of ${name}` }),
            button('Delete', () => removeSecret(one), { className: 'is-danger small', 'aria-label': `Delete the secret ${name}` }),
          ),
          'narrow',
        ],
      )
    },
  })

  async function editRule(rule = null) {
    const before = rule?.injection ?? {}
    const name = input({ required: true, maxLength: 128, value: typeof rule?.name === 'string' ? rule.name : '' })
    const known = KINDS.some(([key]) => key === before.type)
    const kinds = known || !rule ? KINDS : [...KINDS, [String(before.type), shown(before.type, 40)]]
    const kind = select(kinds, typeof before.type === 'string' ? before.type : 'http')
    const address = input({ maxLength: 2000, value: typeof before.base_url === 'string' ? before.base_url : '', placeholder: 'api.example.com/v1/*' })
    const headers = make('textarea', { maxLength: 20_000, spellcheck: false, autocomplete: 'off', placeholder: 'Authorization=Bearer …' })
    const secret = secretInput({ maxLength: 8192 })
    const forHeaders = field('Headers', headers, 'Lines Name=value. Values are stored sealed, and are not shown again.')
    const forSecret = field('Key or token', secret, 'It is stored sealed, and is not shown again.')
    const swap = () => {
      forHeaders.hidden = kind.value !== 'http'
      forSecret.hidden = kind.value === 'http'
    }
    kind.addEventListener('change', swap)
    swap()
    const isDone = await dialog({
      title: rule ? 'Replace the rule' : 'New rule',
      content: [field('Name', name), field('Kind', kind), field('Requests to', address, 'Host, with a port and a path if they matter. Providers have one of their own.'), forHeaders, forSecret],
      action: rule ? 'Replace' : 'Create',
      act: async () => {
        const injection = injectionOf({ kind: kind.value, address: address.value, headers: headers.value, secret: secret.value })
        const body = { name: name.value.trim(), injection }
        await (rule ? change('PUT', path('injection-rules', rule.ruleID), body) : change('POST', 'injection-rules', body))
        return true
      },
    })
    headers.value = ''
    secret.value = ''
    if (isDone) context.say(rule ? 'The rule was replaced.' : 'The rule was created.')
    refreshRules()
  }

  async function removeRule(rule) {
    const isDone = await confirm('Delete this rule?', [nameElement(rule.name, 100), ': sandboxes that name it send their requests without it.'], 'Delete', () => change('DELETE', path('injection-rules', rule.ruleID)))
    if (isDone) context.say('The rule was deleted.')
    refreshRules()
  }

  async function newSecret() {
    const name = input({ required: true, maxLength: 128 })
    const value = secretInput({ required: true, maxLength: 8192 })
    const isDone = await dialog({
      title: 'New secret',
      content: [field('Name', name, 'Header rules of sandboxes refer to it as ${e2b.secrets.NAME}.'), field('Value', value, 'It is stored sealed, and is not shown again.')],
      action: 'Create',
      act: async () => {
        await change('POST', 'secrets', { name: name.value.trim(), value: value.value })
        return true
      },
    })
    value.value = ''
    if (isDone) context.say('The secret was created.')
    refreshSecrets()
  }

  async function setSecret(secret) {
    const value = secretInput({ required: true, maxLength: 8192 })
    const isDone = await dialog({
      title: ['Set the value of ', nameElement(secret.name, 128)],
      content: [field('New value', value, 'Sandboxes use it from their next request on.')],
      action: 'Set',
      act: async () => {
        await change('POST', path('secrets', secret.secretID), { value: value.value })
        return true
      },
    })
    value.value = ''
    if (isDone) context.say('The value was set.')
    refreshSecrets()
  }

  async function removeSecret(secret) {
    const isDone = await confirm('Delete this secret?', [nameElement(secret.name, 128), ': requests whose headers refer to it fail.'], 'Delete', () => change('DELETE', path('secrets', secret.secretID)))
    if (isDone) context.say('The secret was deleted.')
    refreshSecrets()
  }
}

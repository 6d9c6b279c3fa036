// The API keys of the team. A new key is shown once, in a dialog, and is nowhere in the page after that.

import { change, get, isAborted, items, path, reason } from './api.js'
import { button, confirm, dialog, field, input, make, nameElement, note, poll, row, setText, shown, table, timeElement } from './ui.js'

const EVERY_MS = 10_000
const ROWS_MAX = 500

/** A key as the API shows it: its ends. */
function maskText(mask) {
  return mask && typeof mask === 'object' ? shown(`${mask.prefix ?? ''}${mask.maskedValuePrefix ?? ''}…${mask.maskedValueSuffix ?? ''}`, 60) : '–'
}

/** Shows a value that cannot be shown again. */
function showOnce(title, value, text) {
  const said = make('span', { role: 'status', className: 'soft' })
  const secret = make('code', { className: 'secret', textContent: value, tabIndex: 0 })
  return dialog({
    title,
    content: [
      make('p', { textContent: text }),
      secret,
      make(
        'div',
        { className: 'buttons' },
        button('Copy', async () => {
          try {
            await navigator.clipboard.writeText(value)
            said.textContent = 'Copied.'
          } catch {
            // Without HTTPS there is no clipboard; the text is selected instead.
            getSelection().selectAllChildren(secret)
            said.textContent = 'Selected: copy it with the keyboard.'
          }
        }),
        said,
      ),
    ],
    action: null,
    cancel: 'Close',
  })
}

export async function mount(root, context) {
  const status = make('p', { className: 'state-line', textContent: 'Reading …' })
  const { element, body } = table('API keys', ['Name', 'Key', 'Created', 'Last used', ['', 'narrow']])
  element.hidden = true
  root.append(
    make('div', { className: 'head' }, make('h1', { tabIndex: -1, textContent: 'Keys' }), make('div', { className: 'buttons' }, button('Create key', create, { className: 'is-main' }))),
    note('Whoever has a key can do everything that this team can. Deleting the key by which a browser signed in ends its session.'),
    status,
    element,
  )
  let drawn = null
  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      const all = items(await get('api-keys', { signal: context.signal }), 100_000)
      const text = JSON.stringify(all)
      if (text === drawn) return
      drawn = text
      element.hidden = all.length === 0
      setText(status, `${all.length} ${all.length === 1 ? 'key' : 'keys'}${all.length > ROWS_MAX ? `, ${ROWS_MAX} are shown` : ''}.`)
      body.replaceChildren(
        ...all.slice(0, ROWS_MAX).map((one) => {
          const name = shown(one.name, 100)
          return row(
            nameElement(one.name, 100),
            make('code', { textContent: maskText(one.mask) }),
            timeElement(one.createdAt),
            one.lastUsed ? timeElement(one.lastUsed) : 'never',
            [
              make(
                'div',
                { className: 'buttons' },
                button('Rename', () => rename(one), { className: 'small', 'aria-label': `Rename the key ${name}` }),
                button('Delete', () => remove(one), { className: 'is-danger small', 'aria-label': `Delete the key ${name}` }),
              ),
              'narrow',
            ],
          )
        }),
      )
    } catch (error) {
      if (!isAborted(error)) setText(status, `${drawn === null ? 'Not read' : 'Not current'}: ${reason(error)}.`)
      throw error
    }
  })

  async function create() {
    const name = input({ required: true, maxLength: 128, placeholder: 'ci' })
    const made = await dialog({
      title: 'Create a key',
      content: [field('Name', name, 'It says what the key is for.')],
      action: 'Create',
      act: () => change('POST', 'api-keys', { name: name.value.trim() }),
    })
    if (!made) return
    refresh()
    if (typeof made.key === 'string') await showOnce('The key was created', made.key, 'Keep it now: it is not shown again.')
    else context.say('The key was created, and this platform does not show it here. Create keys by the command line instead.')
  }

  async function rename(key) {
    const name = input({ required: true, maxLength: 128, value: typeof key.name === 'string' ? key.name : '' })
    const isDone = await dialog({
      title: 'Rename the key',
      content: [field('Name', name)],
      action: 'Rename',
      act: async () => {
        await change('PATCH', path('api-keys', key.id), { name: name.value.trim() })
        return true
      },
    })
    if (isDone) context.say('The key was renamed.')
    refresh()
  }

  async function remove(key) {
    const isDone = await confirm('Delete this key?', [nameElement(key.name, 100), ' (', make('code', { textContent: maskText(key.mask) }), '): programs that use it are refused from now on.'], 'Delete', () => change('DELETE', path('api-keys', key.id)))
    if (isDone) context.say('The key was deleted.')
    refresh()
  }
}

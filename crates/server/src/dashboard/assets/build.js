// The dialog that builds a template from a recipe: one that comes with the program, a Dockerfile, or a template or an image with commands.
//
// A build has two requests, one that names it and one that starts it. Where the second is refused, the dialog stays and starts
// the same build when it is tried again; a build that was named and never started is cancelled when the dialog is left.

import { change, encoded, get, path } from './api.js'
import { shown } from './text.js'
import { dialog, field, input, Invalid, make, pairsOf, select } from './ui.js'

const KINDS = [
  ['template', 'A template and commands'],
  ['image', 'An image and commands'],
  ['dockerfile', 'A Dockerfile'],
]
const READY_MADE = 'ready-made:'
const TEXT_MAX = 200_000

/** The body of the request that names a build, for what was filled in. */
export function templateOf(given) {
  const name = given.name.trim()
  if (!name) throw new Invalid('A name is required.')
  const cpuCount = Number(given.cpus)
  const memoryMB = Number(given.memory)
  if (!Number.isInteger(cpuCount) || cpuCount < 1) throw new Invalid('The number of cores must be a whole number.')
  if (!Number.isInteger(memoryMB) || memoryMB < 128) throw new Invalid('The memory must be a whole number of MiB, 128 or more.')
  return { name, cpuCount, memoryMB }
}

/** The body of the request that starts a build, for what was filled in. */
export function recipeOf(given) {
  const body = {}
  if (given.kind.startsWith(READY_MADE)) {
    body.fromReadyMade = { name: given.kind.slice(READY_MADE.length), buildArgs: pairsOf(given.text, 'A build argument') }
  } else if (given.kind === 'dockerfile') {
    if (!given.text.trim()) throw new Invalid('A Dockerfile is required.')
    body.fromDockerfile = { dockerfile: given.text }
  } else {
    const source = given.source.trim()
    if (!source) throw new Invalid(given.kind === 'image' ? 'An image is required.' : 'A template is required.')
    body[given.kind === 'image' ? 'fromImage' : 'fromTemplate'] = source
    const commands = given.text.split('\n').map((line) => line.trim()).filter(Boolean)
    body.steps = commands.map((command) => ({ type: 'RUN', args: [command, 'root'] }))
  }
  if (given.start.trim()) body.startCmd = given.start.trim()
  if (given.ready.trim()) body.readyCmd = given.ready.trim()
  return body
}

/** Asks what to build, and goes to the build. `name` is that of a template which gets another build. */
export async function buildTemplate(context, name = '') {
  const nameField = input({ name: 'name', required: true, maxLength: 128, value: name, placeholder: 'my-template' })
  const cpus = input({ type: 'number', name: 'cpus', min: '1', required: true, value: '2' })
  const memory = input({ type: 'number', name: 'memory', min: '128', step: '2', required: true, value: '1024' })
  // Without them, as on an older platform, the others are there all the same.
  const readyMade = await get('ready-made-templates').catch(() => [])
  const kinds = [...KINDS, ...readyMade.map((one) => [READY_MADE + one.name, `Ready-made: ${shown(one.name)}`])]
  const kind = select(kinds, 'template', { name: 'kind' })
  const source = input({ name: 'source', maxLength: 1000, value: 'base' })
  const text = make('textarea', { name: 'text', maxLength: TEXT_MAX, spellcheck: false, rows: 8 })
  const start = input({ name: 'start', maxLength: 10_000, placeholder: 'python3 -m http.server 8000' })
  const ready = input({ name: 'ready', maxLength: 10_000, placeholder: 'curl -sf localhost:8000' })
  const from = field('Template or image', source, 'The name of a template, or the reference of an image in a registry.')
  const recipe = field('Commands', text, 'One in each line. They run one after the other as root, each as a layer.')
  const [label, , hint] = recipe.children
  const started = [field('Start command', start, 'What sandboxes run from their start on, if anything.'), field('Ready command', ready, 'Ends with 0 once a sandbox is ready.')]
  kind.addEventListener('change', () => {
    const made = readyMade.find((one) => READY_MADE + one.name === kind.value)
    const isFile = kind.value === 'dockerfile'
    from.hidden = isFile || Boolean(made)
    for (const one of started) one.hidden = Boolean(made)
    if (made) {
      nameField.value = name || shown(made.templateName)
      cpus.value = String(Number(made.cpuCount) || 2)
      memory.value = String(Number(made.memoryMB) || 1024)
      text.value = ''
      label.textContent = 'Build arguments'
      const known = made.buildArgs.map((one) => `${one.name}=${one.default}`).join(' · ')
      hint.textContent = shown(`${made.description}. One NAME=VALUE in each line, where they differ from: ${known}`)
      return
    }
    label.textContent = isFile ? 'Dockerfile' : 'Commands'
    hint.textContent = isFile
      ? 'COPY takes files of its own stages and of images. For files of yours, build with an SDK or the command line.'
      : 'One in each line. They run one after the other as root, each as a layer.'
  })
  let named = null
  let asked = ''
  const begun = await dialog({
    title: 'Build a template',
    action: 'Build',
    isWide: true,
    content: [
      field('Name', nameField, 'With a tag, if one is meant: name:tag. A template that has this name gets another build.'),
      make('div', { className: 'bar' }, field('Cores', cpus), field('Memory in MiB', memory)),
      field('Recipe', kind),
      from,
      recipe,
      ...started,
    ],
    act: async (progress) => {
      const template = templateOf({ name: nameField.value, cpus: cpus.value, memory: memory.value })
      const isReadyMade = kind.value.startsWith(READY_MADE)
      const [begins, checks] = isReadyMade ? ['', ''] : [start.value, ready.value]
      const body = recipeOf({ kind: kind.value, source: source.value, text: text.value, start: begins, ready: checks })
      progress('Starting …')
      if (named && asked !== JSON.stringify(template)) await drop()
      if (!named) {
        named = await change('POST', 'v3/templates', template)
        asked = JSON.stringify(template)
      }
      await change('POST', `v2/${path('templates', named.templateID, 'builds', named.buildID)}`, body)
      return named
    },
  })
  if (!begun) {
    await drop()
    return
  }
  context.say('The build has begun.')
  context.go(`/dashboard/templates/${encoded(begun.templateID)}/builds/${encoded(begun.buildID)}`)

  /** Cancels what was named and is not started. */
  async function drop() {
    if (!named) return
    const { templateID, buildID } = named
    named = null
    // It ends by itself, where this does not arrive.
    await change('POST', `${path('templates', templateID, 'builds', buildID)}/cancel`).catch(() => {})
  }
}

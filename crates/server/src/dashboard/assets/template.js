// One template: its builds with their log, its tags, and what can be done with it.

import { change, encoded, Failure, get, isAborted, items, path, reason, send, withQuery } from './api.js'
import { buildTemplate } from './build.js'
import { createSandbox } from './create.js'
import { follow } from './logs.js'
import { button, bytes, confirm, dialog, duration, facts, field, fill, input, Invalid, link, make, moment, nameElement, note, number, poll, row, setText, shown, stateElement, table, timeElement, trouble, wordsOf } from './ui.js'

const EVERY_MS = 3000
const BUILDS = 50
const TAGS_MAX = 200
const LAYERS_MAX = 500
// Pages of the list of templates in which one of the platform is looked for.
const PAGES_MAX = 20
// What the API has at most in one answer of a log.
const LOG_PAGE = 100

export async function mount(root, context) {
  const [id, kind, build] = context.parts
  if (kind === 'builds' && build) {
    await mountBuild(root, context, id, build)
    return
  }
  const api = path('templates', id)
  const heading = make('h1', { tabIndex: -1 }, nameElement(id, 100))
  const state = make('span')
  const about = make('div')
  const problem = make('div')
  const create = button('Create sandbox', () => createSandbox(context, id), { className: 'is-main' })
  const rebuild = button('New build', () => buildTemplate(context, nameOf()), { hidden: true })
  const publish = button('Make public', onPublish, { hidden: true })
  const remove = button('Delete', onDelete, { className: 'is-danger', hidden: true })
  const builds = table('Builds', ['Build', 'Status', ['CPU', 'right'], ['Memory', 'right'], 'Began', ['Took', 'right']])
  const tags = table('Tags', ['Tag', 'Build', 'Since', ['', 'narrow']])
  const assign = button('Assign tags', onAssign)
  const status = make('p', { className: 'state-line' })
  root.append(
    make('p', { className: 'way' }, link('/dashboard/templates', 'Templates')),
    make('div', { className: 'head' }, heading, state, make('div', { className: 'buttons' }, create, rebuild, publish, remove)),
    problem,
    about,
    make('h2', { textContent: 'Builds' }),
    status,
    builds.element,
    make('div', { className: 'head section' }, make('h2', { textContent: 'Tags' }), assign),
    tags.element,
  )
  let template = null
  let isOurs = true
  let drawn = ''

  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      const list = await read()
      problem.replaceChildren()
      const text = JSON.stringify([template, list])
      if (text !== drawn) {
        drawn = text
        draw(list)
      }
    } catch (error) {
      if (isAborted(error)) throw error
      if (template) problem.replaceChildren(note(`Not current: ${reason(error)}.`, 'is-bad'))
      else problem.replaceChildren(error.status === 404 ? note('There is no such template.') : trouble(error, () => refresh()))
      throw error
    }
    // Only a build that runs changes much.
    return template.buildStatus === 'building' || template.buildStatus === 'waiting' ? 0 : 10_000
  })

  /** Reads the template, and returns its tags. Those of the platform show neither tags nor builds. */
  async function read() {
    const { signal } = context
    try {
      template = await get(withQuery(api, { limit: BUILDS }), { signal })
    } catch (error) {
      if (error.status !== 403) throw error
      // What is known of it is in the list.
      template = await listed(signal)
      isOurs = false
    }
    if (!isOurs) return []
    try {
      return items(await get(`${api}/tags`, { signal }), TAGS_MAX)
    } catch (error) {
      if (error.status !== 403) throw error
      isOurs = false
      return []
    }
  }

  async function listed(signal) {
    let nextToken = ''
    for (let at = 0; at < PAGES_MAX; at += 1) {
      const { value, headers } = await send('GET', withQuery('api/v2/templates', { limit: 100, nextToken }), { signal })
      const found = items(value, 100).find((one) => one.templateID === id || (Array.isArray(one.names) && one.names.includes(id)))
      if (found) return found
      nextToken = headers.get('x-next-token') ?? ''
      if (!nextToken) break
    }
    throw new Failure(404, 'not found')
  }

  function draw(list) {
    const names = (Array.isArray(template.names) ? template.names : []).slice(0, 10)
    heading.replaceChildren(nameElement(names[0] ?? id, 100))
    context.title(shown(names[0] ?? id, 60))
    if (state.textContent !== template.buildStatus) state.replaceChildren(stateElement(template.buildStatus))
    create.disabled = template.buildStatus !== 'ready'
    rebuild.hidden = publish.hidden = remove.hidden = assign.hidden = !isOurs || template.isDefault === true
    setText(publish, template.public ? 'Make private' : 'Make public')
    fill(
      about,
      facts([
        ['Id', make('code', { textContent: shown(template.templateID, 80) })],
        ['Names', nameElement(names.join(', ') || 'none', 400)],
        ['Size', `${number(template.cpuCount)} CPU, ${bytes(number(template.memoryMB) * 1024 * 1024)} of memory, ${bytes(number(template.diskSizeMB) * 1024 * 1024)} of disk`],
        ['Used by', template.isDefault ? 'every team' : template.public ? 'every team that knows its name' : 'this team'],
        ['Sandboxes created', String(number(template.spawnCount))],
        // Only where the template itself was read: a list has no such figure.
        ...(template.keptReady === undefined ? [] : [['Kept ready', `${number(template.keptReady)} sandboxes at the moment`]]),
        ['Last created', timeElement(template.lastSpawnedAt)],
        ['Builds', String(number(template.buildCount))],
        ['Created', moment(template.createdAt)],
      ]),
    )
    const all = isOurs ? items(template.builds, BUILDS) : []
    setText(status, all.length ? `The newest ${all.length} of ${number(template.buildCount)}.` : 'Its builds and tags are not those of this team.')
    builds.element.hidden = all.length === 0
    const focused = document.activeElement?.getAttribute?.('href')
    builds.body.replaceChildren(
      ...all.map((one) =>
        row(
          link(`/dashboard/templates/${encoded(id)}/builds/${encoded(one.buildID)}`, shown(one.buildID, 60)),
          stateElement(one.status),
          [String(number(one.cpuCount)), 'right'],
          [bytes(number(one.memoryMB) * 1024 * 1024), 'right'],
          timeElement(one.createdAt),
          [one.finishedAt ? duration(Date.parse(one.finishedAt) - Date.parse(one.createdAt)) : '–', 'right'],
        ),
      ),
    )
    if (focused) [...builds.body.querySelectorAll('a')].find((one) => one.getAttribute('href') === focused)?.focus()
    tags.element.hidden = list.length === 0
    tags.element.previousElementSibling.hidden = !isOurs
    tags.body.replaceChildren(
      ...list.map((one) =>
        row(
          nameElement(one.tag, 128),
          make('code', { textContent: shown(one.buildID, 60) }),
          timeElement(one.createdAt),
          [one.tag === 'default' || template.isDefault ? '' : button('Remove', () => onRemoveTag(one.tag), { className: 'is-danger small', 'aria-label': `Remove the tag ${shown(one.tag, 128)}` }), 'narrow'],
        ),
      ),
    )
  }

  const nameOf = () => template?.names?.[0] ?? id

  async function onPublish() {
    const isPublic = !template.public
    const isDone = await confirm(isPublic ? 'Make the template public?' : 'Make the template private?', isPublic ? 'Every team of this platform can create sandboxes from it.' : 'Only this team can create sandboxes from it.', isPublic ? 'Make public' : 'Make private', () =>
      change('PATCH', `v2/${api}`, { public: isPublic }),
    )
    if (isDone) context.say('The template was changed.')
    refresh()
  }

  async function onDelete() {
    if (!(await confirm('Delete this template?', [nameElement(nameOf(), 100), ': no sandbox can be created from it any more. Sandboxes that run stay.'], 'Delete', () => change('DELETE', api)))) return
    context.say('The template was deleted.')
    context.go('/dashboard/templates')
  }

  async function onAssign() {
    const target = input({ required: true, maxLength: 300, value: nameOf() })
    const words = input({ required: true, maxLength: 2000, placeholder: 'stable, v2' })
    const isDone = await dialog({
      title: 'Assign tags',
      content: [field('Build', target, 'The name of the template, or name:tag, where the tag may be the id of a build.'), field('Tags', words, 'With commas between them. A tag that another build has moves to this one.')],
      action: 'Assign',
      act: async () => {
        const list = wordsOf(words.value)
        if (!list.length) throw new Invalid('A tag is required.')
        await change('POST', 'templates/tags', { target: target.value.trim(), tags: list })
        return true
      },
    })
    if (isDone) context.say('The tags were assigned.')
    refresh()
  }

  async function onRemoveTag(tag) {
    const isDone = await confirm('Remove this tag?', [nameElement(tag, 128), ': the build stays.'], 'Remove', () => change('DELETE', 'templates/tags', { name: nameOf(), tags: [tag] }))
    if (isDone) context.say('The tag was removed.')
    refresh()
  }
}

/**
 * How long the steps of a build took, by the lines of its log in their order. A step begins with its first line, and ends with the
 * first line of the next one, because a command that prints nothing has one line; up to there, it has taken the time to its last
 * line. The result notes an entry, and returns the steps whose time it has changed, as `{ name, ms }`.
 */
export function stepTimes() {
  const begun = new Map()
  let last = null
  return (entry) => {
    const at = Date.parse(entry.timestamp)
    if (!entry.step || !Number.isFinite(at)) return []
    const name = String(entry.step)
    if (!begun.has(name)) begun.set(name, at)
    const changed = last === null || last === name ? [name] : [last, name]
    last = name
    return changed.map((one) => ({ name: one, ms: Math.max(0, at - begun.get(one)) }))
  }
}

/** A length of time with a tenth of a second where that matters. */
export function tookText(ms) {
  return ms < 9950 ? `${(ms / 1000).toFixed(1)} s` : duration(ms)
}

/** Writes the time of each step on its first line that is there. Its place has a fixed size: a time that grows moves nothing. */
function timedLines() {
  const note = stepTimes()
  const places = new Map()
  return (entry, line) => {
    for (const { name, ms } of note(entry)) {
      let place = places.get(name)
      // A long log loses its first lines.
      if (!place?.isConnected && name === String(entry.step)) {
        place = make('span', { className: 'took' })
        places.set(name, place)
        line.querySelector('.text').prepend(place)
      }
      if (!place) continue
      setText(place, tookText(ms))
      place.title = `Step ${shown(name, 80)}`
    }
  }
}

/** A build with its log, live while it runs. */
async function mountBuild(root, context, id, build) {
  const api = `${path('templates', id)}/builds/${path(build)}`
  const state = make('span')
  const problem = make('div')
  const cancel = button('Cancel the build', onCancel, { className: 'is-danger', hidden: true })
  const why = make('div')
  const log = make('div')
  root.append(
    make('p', { className: 'way' }, link('/dashboard/templates', 'Templates'), ' / ', link(`/dashboard/templates/${encoded(id)}`, shown(id, 60))),
    make('div', { className: 'head' }, make('h1', { tabIndex: -1 }, 'Build ', nameElement(build, 60)), state, make('div', { className: 'buttons' }, cancel)),
    problem,
    why,
    log,
  )
  context.title(`Build ${shown(build, 40)}`)
  const layers = table('Layers', ['Layer', ['Size', 'right']])
  const layersHead = make('h2', { textContent: 'Layers', hidden: true })
  layers.element.hidden = true
  root.append(layersHead, layers.element)
  let status = ''
  const isOver = () => status === 'ready' || status === 'error'
  const refresh = poll(context.signal, EVERY_MS, async () => {
    try {
      const value = await get(withQuery(`${api}/status`, { limit: 0 }), { signal: context.signal })
      problem.replaceChildren()
      cancel.hidden = value.status !== 'building' && value.status !== 'waiting'
      if (value.status !== status) {
        if (status) context.say(`The build is ${shown(value.status, 20)}.`)
        status = value.status
        state.replaceChildren(stateElement(status))
        why.replaceChildren()
        if (value.reason?.message) why.append(note(`${value.reason.step ? `${shown(value.reason.step, 200)}: ` : ''}${shown(value.reason.message, 2000)}`, 'is-bad'))
      }
      if (status === 'ready' && layers.element.hidden) await showLayers()
      return isOver() ? 60_000 : 0
    } catch (error) {
      if (isAborted(error)) throw error
      problem.replaceChildren(error.status === 404 ? note('There is no such build.') : note(`Not current: ${reason(error)}.`, 'is-bad'))
      throw error
    }
  })
  follow(log, context, {
    label: 'Log of the build',
    most: LOG_PAGE,
    isOver,
    none: 'There is no log: it is kept for seven days.',
    drawn: timedLines(),
    read: async (cursor) => {
      const { value } = await send('GET', withQuery(`api/${api}/logs`, { limit: LOG_PAGE, direction: 'forward', cursor: cursor ?? 0 }), { signal: context.signal })
      return value?.logs
    },
  })
  async function showLayers() {
    const value = await get(`${api}/layers`, { signal: context.signal })
    const list = items(value?.layers, LAYERS_MAX)
    const total = list.reduce((sum, one) => sum + number(one.sizeBytes), 0)
    layersHead.hidden = layers.element.hidden = false
    layers.body.replaceChildren(
      ...(value?.hasBase === true ? [row('base, of the platform', ['–', 'right'])] : []),
      ...list.map((one) => row(make('code', { textContent: shown(one.layerID, 80) }), [typeof one.sizeBytes === 'number' ? bytes(one.sizeBytes) : 'not on this host', 'right'])),
      row('All of them', [bytes(total), 'right']),
    )
  }
  async function onCancel() {
    const isDone = await confirm('Cancel the build?', 'What it has built is dropped. The template stays as it was.', 'Cancel the build', () => change('POST', `${api}/cancel`))
    if (isDone) context.say('The build was cancelled.')
    refresh()
  }
}

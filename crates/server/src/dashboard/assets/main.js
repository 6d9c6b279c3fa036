// The dashboard's first script: sign-in, the frame around all pages, and which page is shown at an address.
//
// Addresses are those of the history of the browser, so that each page can be linked to, and left by the back button. A page
// is a module with `mount(root, context)`, loaded when it is first shown; its work ends with `context.signal`. Nothing is kept
// in the browser: who is signed in is known by a cookie that no script can read.

import { BASE, Failure, reason, send, whenSignedOut } from './api.js'
import { button, input, field, link, liveRegion, make, nameElement, note, say, shown } from './ui.js'

// Path below /dashboard, and the module that shows it.
const PAGES = [
  { name: 'Sandboxes', path: 'sandboxes', module: './sandboxes.js', detail: './sandbox.js' },
  { name: 'Templates', path: 'templates', module: './templates.js', detail: './template.js' },
  { name: 'Injections', path: 'injections', module: './injections.js' },
  { name: 'Keys', path: 'keys', module: './keys.js' },
  { name: 'Events', path: 'events', module: './events.js' },
  { name: 'Team', path: 'team', module: './team.js' },
]

let session = null
// Ends what the shown page does.
let life = null
let isLeaving = false
// What goes on after its page, as the end of a shell does, and needs the session.
const endings = new Set()
const ENDINGS_MS = 2000

const main = make('main', { id: 'content', tabIndex: -1 })
const live = liveRegion()

function frame() {
  // The operator has one page, and sees no sandbox from inside.
  const links = session.team ? PAGES.map((page) => link(`${BASE}/${page.path}`, page.name)) : [link(BASE, 'Host', { 'aria-current': 'page' })]
  const nav = make('nav', { 'aria-label': 'Dashboard' }, ...links)
  const who = make('div', { className: 'who' }, make('span', { className: 'team', title: 'Who is signed in' }, nameElement(session.team?.name ?? 'operator', 60)), button('Sign out', signOut))
  const header = make('header', { className: 'top' }, make('a', { className: 'name', href: `${BASE}/sandboxes`, textContent: 'Ringfence' }), nav, who)
  const footer = make(
    'footer',
    {},
    make('span', { textContent: `Ringfence ${shown(session.version, 40)}` }),
    make('a', { href: '/docs', textContent: 'Documentation' }),
  )
  document.body.replaceChildren(make('a', { className: 'skip', href: '#content', textContent: 'Skip to content' }), header, main, footer, live)
}

function titled(title) {
  document.title = `${title} - Ringfence`
}

// Sign-in.

function signIn(message = '') {
  life?.abort()
  session = null
  titled('Sign in')
  const credential = input({ type: 'password', name: 'credential', required: true, maxLength: 1000, autocomplete: 'off', spellcheck: false })
  const error = make('p', { className: 'error', role: 'alert', id: 'sign-in-error', textContent: message })
  const submit = make('button', { type: 'submit', className: 'is-main', textContent: 'Sign in' })
  const form = make(
    'form',
    {
      className: 'sign-in',
      onsubmit: async (event) => {
        event.preventDefault()
        submit.disabled = true
        error.textContent = ''
        try {
          const { value } = await send('POST', 'session', { body: { credential: credential.value.trim() }, isSignIn: true })
          credential.value = ''
          began(value)
        } catch (problem) {
          error.textContent = `Not signed in: ${reason(problem)}.`
          credential.setAttribute('aria-invalid', 'true')
          credential.focus()
          credential.select()
        } finally {
          submit.disabled = false
        }
      },
    },
    make('h1', { textContent: 'Sign in to Ringfence' }),
    field('API key or access token', credential, 'It is sent to this platform, and is not kept in the browser.'),
    error,
    submit,
    make(
      'p',
      { className: 'hint' },
      'The first key is in ',
      make('code', { textContent: 'credentials.env' }),
      '. The operator gets a code for the whole host by ',
      make('code', { textContent: 'ringfence dashboard' }),
      '. ',
      make('a', { href: '/docs/dashboard', textContent: 'How to sign in' }),
    ),
  )
  main.replaceChildren(form)
  document.body.replaceChildren(main, live)
  credential.focus()
}

function began(value) {
  session = value && typeof value === 'object' ? value : {}
  isLeaving = false
  frame()
  show()
}

function ending(promise) {
  endings.add(promise)
  promise.finally(() => endings.delete(promise))
}

async function signOut() {
  life?.abort()
  await Promise.race([Promise.all(endings), new Promise((done) => setTimeout(done, ENDINGS_MS))])
  try {
    await send('DELETE', 'session')
  } catch (error) {
    if (error.status !== 401) {
      say(`Not signed out: ${reason(error)}.`)
      show()
      return
    }
  }
  isLeaving = true
  closeDialogs()
  history.replaceState(null, '', `${BASE}/sandboxes`)
  signIn('')
  say('Signed out.')
}

whenSignedOut(() => {
  if (!session || isLeaving) return
  closeDialogs()
  signIn('The session has ended. Sign in again to go on where you were.')
})

// Pages.

function partsOf(pathname) {
  const parts = []
  for (const part of pathname.slice(BASE.length).split('/').filter(Boolean)) {
    try {
      parts.push(decodeURIComponent(part))
    } catch {
      parts.push(part)
    }
  }
  return parts
}

/** Goes to another page. */
function go(href) {
  history.pushState(null, '', href)
  show()
}

function closeDialogs() {
  for (const open of document.querySelectorAll('dialog')) open.close()
}

async function show() {
  // One may have a link in it.
  closeDialogs()
  if (!session) return
  if (!session.team) {
    await mounted('./operator.js', 'Host', [])
    return
  }
  const [first = 'sandboxes', ...rest] = partsOf(location.pathname)
  const page = PAGES.find((one) => one.path === first)
  for (const one of document.querySelectorAll('.top nav a')) {
    if (page && one.getAttribute('href') === `${BASE}/${page.path}`) {
      one.setAttribute('aria-current', 'page')
      // A narrow window shows a part of them.
      one.parentElement.scrollLeft = one.offsetLeft - 80
    } else one.removeAttribute('aria-current')
  }
  if (!page || (rest.length && !page.detail && page.path !== 'events')) {
    life?.abort()
    titled('Not found')
    main.replaceChildren(make('h1', { tabIndex: -1, textContent: 'Page not found' }), note('There is no page at this address.'), link(`${BASE}/sandboxes`, 'Sandboxes'))
    main.querySelector('h1').focus()
    return
  }
  await mounted(rest.length && page.detail ? page.detail : page.module, page.name, rest)
}

let isFirst = true

async function mounted(module, name, parts) {
  life?.abort()
  life = new AbortController()
  const { signal } = life
  // What was announced belongs to the page before.
  const context = { session, signal, parts, go, say, ending, title: titled }
  titled(name)
  try {
    const { mount } = await import(module)
    if (signal.aborted) return
    const root = make('div', { className: 'page' })
    main.replaceChildren(root)
    await mount(root, context)
  } catch (error) {
    if (signal.aborted) return
    console.error(error)
    main.replaceChildren(make('h1', { tabIndex: -1, textContent: name }), note('This page cannot be loaded. Reload it to try again.', 'is-bad'))
  }
  if (signal.aborted) return
  // A page that was followed to is read from its beginning; the first one of all is where the browser put the focus.
  if (!isFirst && !main.contains(document.activeElement)) main.querySelector('h1')?.focus({ preventScroll: true })
  if (!isFirst) scrollTo(0, 0)
  isFirst = false
}

document.addEventListener('click', (event) => {
  const anchor = event.target.closest?.('a[href]')
  if (!anchor || event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return
  if (anchor.target || anchor.hasAttribute('download') || anchor.origin !== location.origin) return
  if (anchor.getAttribute('href') === '#content') {
    event.preventDefault()
    main.focus()
    return
  }
  const below = anchor.pathname === BASE || anchor.pathname.startsWith(`${BASE}/`)
  if (!below || anchor.pathname.startsWith(`${BASE}/agent/`) || anchor.pathname.startsWith(`${BASE}/assets/`)) return
  event.preventDefault()
  go(anchor.href)
})
addEventListener('popstate', show)

async function start() {
  document.body.replaceChildren(main, live)
  try {
    began((await send('GET', 'session', { isSignIn: true })).value)
  } catch (error) {
    if (error instanceof Failure && error.status === 401) signIn('')
    else {
      main.replaceChildren(
        make('h1', { textContent: 'Ringfence' }),
        note(`The dashboard cannot be shown: ${reason(error)}.`, 'is-bad'),
        button('Try again', start),
      )
    }
  }
}

start()

// Requests of the pages: the session, the public API with the session in the place of a key, and the agents of sandboxes.
//
// Every request carries `MARK`, which a page of another origin cannot set; the server refuses those without it. An answer 401
// means that nobody is signed in any more: `signedOut` is called once, and the page goes to the sign-in. Nothing is sent again
// by itself except reads that a page repeats anyway (`poll` in `ui.js`), with pauses that grow while they fail. Answers are
// data from elsewhere: they are bounded here, and their strings are shown with `text.js`.

import { bounded } from './agent.js'
import { shown } from './text.js'

export const BASE = '/dashboard'
export const MARK = { 'X-Ringfence-Dashboard': '1' }
// The largest answer that is read.
const ANSWER_MAX = 16 * 1024 * 1024
const MESSAGE_MAX = 2000

let onSignedOut = () => {}
// Milliseconds by which the server's clock is ahead of the browser's.
let ahead = 0

/** Calls `listener` when an answer says that nobody is signed in. */
export function whenSignedOut(listener) {
  onSignedOut = listener
}

/** The time of the server, in milliseconds since the Unix epoch. */
export function now() {
  return Date.now() + ahead
}

/** A request that was refused, or that did not arrive (`status` 0). The message is text of the server. */
export class Failure extends Error {
  constructor(status, message, retryAfter = 0) {
    super(message)
    this.name = 'Failure'
    this.status = status
    this.retryAfter = retryAfter
  }
}

/** What is said about an error of a request. */
export function reason(error) {
  if (error instanceof Failure) return shown(error.message, MESSAGE_MAX)
  if (error?.name === 'AgentError') return shown(`${error.message} (${error.code})`, MESSAGE_MAX)
  return 'the page has a fault; its message is in the console of the browser'
}

/** Whether an error only says that the page went on to something else. */
export function isAborted(error) {
  return error?.name === 'AbortError'
}

function noteClock(response) {
  const date = Date.parse(response.headers.get('date') ?? '')
  // The header has whole seconds; what is less is no difference.
  if (Number.isFinite(date)) ahead = Math.abs(date - Date.now()) > 2000 ? date - Date.now() : 0
}

/** Text of the error in an answer. */
function messageOf(bytes, status) {
  try {
    const value = JSON.parse(new TextDecoder().decode(bytes))
    if (typeof value?.message === 'string' && value.message) return value.message
  } catch {
    // Not an answer of the platform: a proxy before it, for instance.
  }
  return `the request failed with the status ${status}`
}

/** An answer as `{ value, headers }`; one that is not a success is a `Failure`. */
export async function send(method, path, { body, signal, headers, isSignIn = false } = {}) {
  let response
  let read
  try {
    response = await fetch(`${BASE}/${path}`, {
      method,
      headers: { ...MARK, ...(body === undefined ? {} : { 'Content-Type': 'application/json' }), ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: 'no-store',
      credentials: 'same-origin',
      redirect: 'error',
    })
    noteClock(response)
    read = await bounded(response, ANSWER_MAX)
  } catch (error) {
    if (signal?.aborted || isAborted(error)) throw new DOMException('left', 'AbortError')
    throw new Failure(0, 'the platform cannot be reached')
  }
  if (!response.ok) {
    const seconds = Number(response.headers.get('retry-after')) || 0
    let message = messageOf(read.bytes, response.status)
    if (response.status === 429 || response.status === 503) message += seconds ? ` (try again in ${seconds} s)` : ' (try again later)'
    if (response.status === 401 && !isSignIn) onSignedOut()
    throw new Failure(response.status, message, seconds)
  }
  if (read.isCut) throw new Failure(0, 'the answer is larger than this page reads')
  let value = null
  if (read.bytes.length) {
    try {
      value = JSON.parse(new TextDecoder().decode(read.bytes))
    } catch {
      throw new Failure(0, 'the answer is not JSON')
    }
  }
  return { value, headers: response.headers }
}

/**
 * A part of a path. What cannot be one becomes one that nothing has: half of a surrogate pair, and the dots by which a browser
 * would leave the folder, also where they are encoded.
 */
export function encoded(part) {
  const text = String(part)
  if (/^\.{0,2}$/u.test(text)) return '_'
  try {
    return encodeURIComponent(text)
  } catch {
    return '_'
  }
}

/** The path of parts, each of which is encoded. */
export function path(...parts) {
  return parts.map(encoded).join('/')
}

/** A path with a query; values that are empty are left out. */
export function withQuery(base, query) {
  const pairs = new URLSearchParams()
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined && value !== null && value !== '') pairs.set(name, String(value))
  }
  const text = String(pairs)
  return text ? `${base}?${text}` : base
}

/** The value of a read of the public API. */
export async function get(where, options) {
  return (await send('GET', `api/${where}`, options)).value
}

/** The value of a call of the public API that changes something. */
export async function change(method, where, body, options) {
  return (await send(method, `api/${where}`, { body, ...options })).value
}

/** The items of an answer that ought to be a list of objects. */
export function items(value, most = 1000) {
  return Array.isArray(value) ? value.filter((item) => item !== null && typeof item === 'object').slice(0, most) : []
}

/** The address of the agent of a sandbox. */
export function agentOf(id) {
  return `${BASE}/agent/${encoded(id)}`
}

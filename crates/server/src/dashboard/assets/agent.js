// A client of the Connect protocol with JSON, for the agent of a sandbox: unary calls and server streams, by `fetch`.
//
// Whoever is root in a sandbox may write what the agent answers, so every message is bounded (`MESSAGE_MAX`), also one that
// only declares its length, and an answer is data: callers show it with `text.js`. No call is tried again here.
//
// A message of a stream has an envelope: one byte of flags, four bytes of length (big-endian), then JSON. The one with the
// flag END is the last, and is the only place where a stream says that it failed.

// The largest message, of a stream or of a unary answer.
export const MESSAGE_MAX = 4 * 1024 * 1024

const COMPRESSED = 1
const END = 2
const HEADER = 5

/** An error that the agent, or what stands before it, answered: a Connect code, and a message of unknown origin. */
export class AgentError extends Error {
  constructor(code, message) {
    super(message)
    this.name = 'AgentError'
    this.code = code
  }
}

// Codes for answers that are not of the Connect protocol, as of a proxy before the agent.
const CODES = new Map([
  [400, 'internal'], [401, 'unauthenticated'], [403, 'permission_denied'], [404, 'unimplemented'],
  [429, 'unavailable'], [502, 'unavailable'], [503, 'unavailable'], [504, 'unavailable'],
])

/** Standard base64, which the JSON form of `bytes` is. */
export function toBase64(bytes) {
  let text = ''
  // The arguments of one call are bounded.
  for (let at = 0; at < bytes.length; at += 0x2000) text += String.fromCharCode(...bytes.subarray(at, at + 0x2000))
  return btoa(text)
}

/** Bytes of base64; text that is not base64 is an `AgentError`. */
export function fromBase64(text) {
  let binary
  try {
    binary = atob(text)
  } catch {
    throw new AgentError('internal', 'the agent sent bytes that are not base64')
  }
  const bytes = new Uint8Array(binary.length)
  for (let at = 0; at < binary.length; at += 1) bytes[at] = binary.charCodeAt(at)
  return bytes
}

/** One message of a stream with its envelope. */
export function envelope(message, flags = 0) {
  const payload = new TextEncoder().encode(JSON.stringify(message))
  const out = new Uint8Array(HEADER + payload.length)
  out[0] = flags
  new DataView(out.buffer).setUint32(1, payload.length)
  out.set(payload, HEADER)
  return out
}

/** Takes a stream apart into envelopes, wherever the chunks of the network begin and end. */
export class Envelopes {
  #header = new Uint8Array(HEADER)
  #filled = 0
  #payload = null
  #limit

  constructor(limit = MESSAGE_MAX) {
    this.#limit = limit
  }

  /** Whether a message has begun that has no end yet. */
  get isPartial() {
    return this.#filled > 0
  }

  /** The messages that end in these bytes, each `{ flags, payload }`. */
  push(bytes) {
    const out = []
    let at = 0
    while (at < bytes.length) {
      if (this.#filled < HEADER) {
        const taken = Math.min(HEADER - this.#filled, bytes.length - at)
        this.#header.set(bytes.subarray(at, at + taken), this.#filled)
        this.#filled += taken
        at += taken
        if (this.#filled < HEADER) break
        const length = new DataView(this.#header.buffer).getUint32(1)
        if (length > this.#limit) throw new AgentError('resource_exhausted', `a message of ${length} bytes is larger than ${this.#limit}`)
        this.#payload = new Uint8Array(length)
      }
      const taken = Math.min(this.#payload.length - (this.#filled - HEADER), bytes.length - at)
      this.#payload.set(bytes.subarray(at, at + taken), this.#filled - HEADER)
      this.#filled += taken
      at += taken
      if (this.#filled - HEADER === this.#payload.length) {
        out.push({ flags: this.#header[0], payload: this.#payload })
        this.#filled = 0
        this.#payload = null
      }
    }
    return out
  }
}

/** JSON of an answer; anything else than an object is an `AgentError`. */
function objectOf(bytes) {
  let value
  try {
    value = JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes))
  } catch {
    throw new AgentError('internal', 'the agent sent a message that is not JSON')
  }
  if (value === null || typeof value !== 'object' || Array.isArray(value)) {
    throw new AgentError('internal', 'the agent sent a message that is not a JSON object')
  }
  return value
}

function errorOf(value, code = 'unknown') {
  return new AgentError(
    typeof value?.code === 'string' ? value.code : code,
    typeof value?.message === 'string' && value.message ? value.message : `the agent answered with the error ${code}`,
  )
}

/** The body of an answer, read no further than the limit; `isCut` when there was more. */
export async function bounded(response, limit = MESSAGE_MAX) {
  const reader = response.body?.getReader()
  if (!reader) return { bytes: new Uint8Array(), isCut: false }
  const chunks = []
  let length = 0
  for (;;) {
    const { done, value } = await reader.read()
    if (done) break
    chunks.push(value)
    length += value.length
    if (length > limit) {
      // What is not read must not be sent any further.
      await reader.cancel().catch(() => {})
      break
    }
  }
  const bytes = new Uint8Array(length)
  let at = 0
  for (const chunk of chunks) {
    bytes.set(chunk, at)
    at += chunk.length
  }
  return length > limit ? { bytes: bytes.subarray(0, limit), isCut: true } : { bytes, isCut: false }
}

/** The error of an answer that is not a success. */
export async function failure(response) {
  const code = CODES.get(response.status) ?? 'unknown'
  const { bytes } = await bounded(response, 64 * 1024)
  try {
    return errorOf(objectOf(bytes), code)
  } catch {
    return new AgentError(code, `the request failed with the status ${response.status}`)
  }
}

/** The header that names the user of the system inside; without one the default of the template applies. */
export function userHeaders(user) {
  return user ? { Authorization: `Basic ${toBase64(new TextEncoder().encode(`${user}:`))}` } : {}
}

async function post(agent, method, type, body, { user, signal, headers, keepalive } = {}) {
  return fetch(`${agent}/${method}`, {
    method: 'POST',
    headers: { 'Content-Type': type, 'Connect-Protocol-Version': '1', ...userHeaders(user), ...headers },
    body,
    signal,
    keepalive,
    cache: 'no-store',
    credentials: 'same-origin',
    // What answers with a redirect is not the agent.
    redirect: 'error',
  })
}

/** A unary call such as `filesystem.Filesystem/ListDir`. Options: `user`, `signal`, `headers`, `keepalive`. */
export async function call(agent, method, message, options = {}) {
  const response = await post(agent, method, 'application/json', JSON.stringify(message), options)
  if (!response.ok) throw await failure(response)
  const { bytes, isCut } = await bounded(response)
  if (isCut) throw new AgentError('resource_exhausted', `the answer is larger than ${MESSAGE_MAX} bytes`)
  return objectOf(bytes)
}

/**
 * The messages of a server stream such as `process.Process/Start`, one after the other. The loop over them ends when the
 * stream says so; a stream that breaks off, or that says that it failed, is an `AgentError`.
 */
export async function* stream(agent, method, message, options = {}) {
  const headers = { 'Keepalive-Ping-Interval': '30', ...options.headers }
  const response = await post(agent, method, 'application/connect+json', envelope(message), { ...options, headers })
  if (!response.ok) throw await failure(response)
  const type = response.headers.get('content-type') ?? ''
  if (!type.startsWith('application/connect+json')) {
    await response.body?.cancel().catch(() => {})
    throw new AgentError('internal', 'the answer is not a stream of the Connect protocol')
  }
  const reader = response.body.getReader()
  const envelopes = new Envelopes()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) throw new AgentError('unavailable', 'the connection ended before the stream did')
      for (const { flags, payload } of envelopes.push(value)) {
        if (flags & COMPRESSED) throw new AgentError('internal', 'the agent sent a compressed message, which was not asked for')
        const content = objectOf(payload)
        if (flags & END) {
          if (content.error) throw errorOf(content.error)
          return
        }
        yield content
      }
    }
  } finally {
    // Also when the caller leaves its loop.
    await reader.cancel().catch(() => {})
  }
}

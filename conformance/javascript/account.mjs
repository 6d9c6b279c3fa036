// Keeps account of the SDK's methods that a suite calls, and writes them to RINGFENCE_CALLED at the end, one per line:
// `Class.method` or `Class.static method`. What the SDK calls itself on the way does not count.

import { AsyncLocalStorage } from 'node:async_hooks'
import { appendFileSync } from 'node:fs'
import { runInThisContext } from 'node:vm'
import { Sandbox, TemplateBase } from 'e2b'

const called = new Set()
const inside = new AsyncLocalStorage()
const watched = new WeakSet()

// The SDK looks for the line of a program that called it, and passes over files that begin with `node:`.
const around = runInThisContext(
  `(value, inside, heard) => function (...given) {
    if (inside.getStore()) return value.apply(this, given)
    return heard(inside.run(true, () => value.apply(this, given)))
  }`,
  { filename: 'node:account' },
)

function watch(holder, prefix) {
  if (watched.has(holder)) return
  watched.add(holder)
  for (const [name, { value, writable }] of Object.entries(Object.getOwnPropertyDescriptors(holder))) {
    if (typeof value !== 'function' || !writable || name === 'constructor') continue
    holder[name] = around(value, inside, (result) => {
      called.add(`${prefix}${name}`)
      // Heard before the caller hears it; a failure is the caller's matter.
      if (result instanceof Promise) result.then(handle, () => {})
      return result
    })
  }
}

/** Takes the class of a handle into the account: nothing exports these classes. */
function handle(result) {
  const name = result?.constructor?.name
  if (name === 'CommandHandle' || name === 'WatchHandle') watch(Object.getPrototypeOf(result), `${name}.`)
}

/** Takes the classes that hang on a sandbox into the account. */
export function account(sandbox) {
  for (const part of [sandbox.files, sandbox.commands, sandbox.pty, sandbox.git]) {
    watch(Object.getPrototypeOf(part), `${part.constructor.name}.`)
  }
  return sandbox
}

for (let holder = Sandbox; holder !== Function.prototype; holder = Object.getPrototypeOf(holder)) {
  watch(holder, 'Sandbox.static ')
  watch(holder.prototype, 'Sandbox.')
}
watch(TemplateBase, 'Template.static ')
watch(TemplateBase.prototype, 'Template.')
process.on('exit', () => {
  if (called.size > 0) appendFileSync(process.env.RINGFENCE_CALLED, [...called, ''].join('\n'))
})

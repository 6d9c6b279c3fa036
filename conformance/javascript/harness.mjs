// What the suites share: sandboxes that end with their test, waiting, and requests under a name that no resolver knows.

import { readFileSync } from 'node:fs'
import http from 'node:http'
import { Sandbox } from 'e2b'
import { account } from './account.mjs'

// Where the platform listens.
const [hostname, port] = process.env.RINGFENCE_ADDRESS.split(':')

/** A sandbox of its own for one test; it ends with the test, whatever happened. */
export async function sandboxFor(t, { template = 'base', ...options } = {}) {
  const sandbox = await Sandbox.create(template, { timeoutMs: 120_000, ...options })
  t.after(() => sandbox.kill())
  return account(sandbox)
}

/** The text of a program that the suites run inside sandboxes. */
export function program(name) {
  return readFileSync(`${process.env.RINGFENCE_PROGRAMS}/${name}`, 'utf8')
}

/** Standard output of a command as root inside. */
export async function asRoot(sandbox, command) {
  return (await sandbox.commands.run(command, { user: 'root' })).stdout
}

/** How many times slower this machine is than the one for which deadlines were written. */
const PATIENCE = Number(process.env.RINGFENCE_PATIENCE ?? 1)

/** Waits for something that another process does; `what` may be a function, for what is known only at the end. */
export async function until(condition, what, withinMs = 20_000 * PATIENCE) {
  const deadline = Date.now() + withinMs
  for (;;) {
    const value = await condition()
    if (value) return value
    if (Date.now() > deadline) {
      throw new Error(`still not so after ${withinMs} ms: ${typeof what === 'function' ? what() : what}`)
    }
    await new Promise((wake) => setTimeout(wake, 20))
  }
}

/**
 * One request to the platform's address with the given Host: `getHost()` names a host below `localhost`, which plain
 * resolvers do not resolve, and `fetch` does not let its caller choose the header.
 */
export function request(host, path = '/', { method = 'GET', headers = {}, body } = {}) {
  return new Promise((resolve, reject) => {
    const sent = http.request(
      { host: hostname, port, path, method, headers: { ...headers, Host: host }, agent: false },
      (answer) => {
        const chunks = []
        answer.on('data', (chunk) => chunks.push(chunk))
        answer.on('error', reject)
        answer.on('end', () =>
          resolve({ status: answer.statusCode, headers: answer.headers, text: Buffer.concat(chunks).toString() }),
        )
      },
    )
    sent.on('error', reject)
    sent.end(body)
  })
}

// All processes of a sandbox, from the files of its kernel: also those that no request has started.
//
// They are listed when they are asked for and not again and again, because a shell inside reads them. Whoever is root inside
// may show other ones, so their number is bounded and they are shown as text.

import { fromBase64, stream } from './agent.js'
import { Failure, isAborted, MARK } from './api.js'

export const LISTED_MAX = 300
const OUTPUT_MAX = 512 * 1024
const TIMEOUT_MS = 20_000
const PAGE_BYTES = 4096
const TICKS_PER_SECOND = 100
// Two lines for each process: `stat`, and the command. Neither can have a line end.
const SCRIPT = `echo $$
count=0
for process in /proc/[0-9]*; do
  count=$((count + 1))
  [ $count -le ${LISTED_MAX + 1} ] || break
  stat=$(tr '\\n' ' ' 2>/dev/null <$process/stat) || continue
  command=$(tr '\\0\\n' '  ' 2>/dev/null <$process/cmdline | head -c 400)
  printf '%s\\n%s\\n' "$stat" "$command"
done`

/** The processes in what the script has written, but those of the script itself. */
export function processesOf(text) {
  const [own = '', ...lines] = text.split('\n')
  const self = Number(own)
  const found = []
  for (let at = 0; at + 1 < lines.length && found.length < LISTED_MAX; at += 2) {
    const [stat, command] = [lines[at], lines[at + 1].trim()]
    // A name may contain parentheses and spaces: the last one ends it.
    const [begin, end] = [stat.indexOf('('), stat.lastIndexOf(')')]
    const values = stat.slice(end + 1).trim().split(/\s+/u)
    const [pid, parent, user, system, pages] = [stat.slice(0, Math.max(begin, 0)), values[1], values[11], values[12], values[21]].map(Number)
    if (begin < 1 || end < begin || ![pid, parent, user, system, pages].every(Number.isSafeInteger)) continue
    if (pid === self || parent === self) continue
    found.push({ pid, parent, state: values[0], command: command || `[${stat.slice(begin + 1, end)}]`, seconds: (user + system) / TICKS_PER_SECOND, bytes: Math.max(pages, 0) * PAGE_BYTES })
  }
  return found
}

/** Lists the processes of a sandbox, within a time: what answers may be a program of the sandbox that never ends. */
export async function listProcesses(context) {
  const message = { process: { cmd: '/bin/sh', args: ['-c', SCRIPT] } }
  const signal = AbortSignal.any([context.signal, AbortSignal.timeout(TIMEOUT_MS)])
  const decoder = new TextDecoder()
  let text = ''
  let isWhole = false
  try {
    for await (const { event } of stream(context.agent, 'process.Process/Start', message, { user: 'root', headers: MARK, signal })) {
      if (typeof event?.data?.stdout === 'string') text += decoder.decode(fromBase64(event.data.stdout), { stream: true })
      if (text.length > OUTPUT_MAX) break
      if (event?.end) isWhole = (event.end.exitCode ?? 0) === 0
    }
  } catch (error) {
    if (context.signal.aborted || (isAborted(error) && !signal.aborted)) throw error
    if (signal.aborted) throw new Failure(0, 'the sandbox has not answered in time')
    throw error
  }
  if (!isWhole) throw new Failure(0, 'the shell of the sandbox could not list them')
  return processesOf(text)
}

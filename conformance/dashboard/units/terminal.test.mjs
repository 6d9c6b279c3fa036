// What the terminal sends for keys and pasted text, and how it cuts a row where the cursor is.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asset, bytesOf, numbers } from './assets.mjs'

const { cssColour, encodeKey, ending, preparePaste, preview, rowParts, typed } = await asset('terminal.js')
const { Screen, TRUE_COLOUR } = await asset('vt.js')

const NORMAL = { applicationCursor: false }

function key(name, modifiers = '', modes = NORMAL) {
  return encodeKey(
    { key: name, ctrlKey: modifiers.includes('c'), altKey: modifiers.includes('a'), shiftKey: modifiers.includes('s'), metaKey: modifiers.includes('m'), isAltGraph: modifiers.includes('g') },
    modes,
  )
}

test('keys send what xterm sends', () => {
  const cases = [
    ['ArrowUp', '', '\x1b[A'], ['ArrowDown', '', '\x1b[B'], ['ArrowRight', '', '\x1b[C'], ['ArrowLeft', '', '\x1b[D'], ['Home', '', '\x1b[H'], ['End', '', '\x1b[F'],
    ['ArrowUp', 'c', '\x1b[1;5A'], ['ArrowLeft', 'a', '\x1b[1;3D'], ['ArrowRight', 'cs', '\x1b[1;6C'], ['PageUp', '', '\x1b[5~'], ['PageDown', 'c', '\x1b[6;5~'],
    ['Insert', '', '\x1b[2~'], ['Delete', '', '\x1b[3~'], ['F1', '', '\x1bOP'], ['F4', '', '\x1bOS'], ['F1', 's', '\x1b[1;2P'], ['F5', '', '\x1b[15~'], ['F10', '', '\x1b[21~'],
    ['F11', '', '\x1b[23~'], ['F12', 'c', '\x1b[24;5~'], ['Backspace', '', '\x7f'], ['Backspace', 'c', '\x08'], ['Backspace', 'a', '\x1b\x7f'], ['Enter', '', '\r'],
    ['Enter', 'a', '\x1b\r'], ['Tab', '', '\t'], ['Tab', 's', '\x1b[Z'], ['Escape', '', '\x1b'], ['c', 'c', '\x03'], ['C', 'cs', '\x03'], ['d', 'c', '\x04'], ['z', 'c', '\x1a'],
    [' ', 'c', '\0'], ['@', 'c', '\0'], ['[', 'c', '\x1b'], ['\\', 'c', '\x1c'], [']', 'c', '\x1d'], ['^', 'c', '\x1e'], ['_', 'c', '\x1f'], ['/', 'c', '\x1f'], ['?', 'c', '\x7f'],
    ['b', 'a', '\x1bb'], ['.', 'a', '\x1b.'], ['x', 'ca', '\x1b\x18'],
  ]
  for (const [name, modifiers, expected] of cases) assert.equal(key(name, modifiers), expected, `${name} ${modifiers}`)
  assert.equal(key('ArrowUp', '', { applicationCursor: true }), '\x1bOA')
  assert.equal(key('Home', '', { applicationCursor: true }), '\x1bOH')
  assert.equal(key('ArrowUp', 'c', { applicationCursor: true }), '\x1b[1;5A')
})

test('characters, and keys of the browser, are left to the page', () => {
  for (const [name, modifiers] of [['a', ''], ['A', 's'], ['é', ''], ['界', ''], ['v', 'm'], ['@', 'cag'], ['å', 'a'], ['Shift', 's'], ['Dead', ''], ['Process', ''], ['F13', ''], ['ä', 'c']]) {
    assert.equal(key(name, modifiers), null, `${name} ${modifiers}`)
  }
})

test('typed text has carriage returns and no control characters', () => {
  assert.equal(typed('a\nb\r\nc\rd\te\x1b\x03\x7f\x9b'), 'a\rb\rc\rd\te')
})

const END = '\x1b[201~'

test('a paste cannot leave the paste mode', () => {
  const hostile = [
    `a${END}id\n`, `${END}${END}x`, `\x1b[20\x1b[201~1~x`, `\x1b\x1b[201~[201~x`, `\x9b201~x`, `\x1b[200~x`, `\u009b201~\nx`, `\x1b[${END}201~`, `${'\x1b'.repeat(9)}[201~`, `\x1b[2\x0001~x`,
    `\x1b\r[201~`,
  ]
  for (const text of hostile) {
    const { text: sent, isAsked } = preparePaste(text, true)
    if (sent === '') continue
    assert.ok(sent.startsWith('\x1b[200~') && sent.endsWith(END), JSON.stringify(sent))
    assert.doesNotMatch(sent.slice(6, -6), /[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f]/, JSON.stringify(sent))
    assert.equal(isAsked, false)
  }
  const next = numbers(3)
  const pieces = ['\x1b', '[', '2', '0', '1', '~', '\x9b', '\n', 'a', END, '\x00', '\r']
  for (let round = 0; round < 5000; round += 1) {
    const text = Array.from({ length: 12 }, () => pieces[next(pieces.length)]).join('')
    const { text: sent } = preparePaste(text, true)
    assert.doesNotMatch(sent.slice(6, -6), /[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f]/, JSON.stringify(text))
    assert.doesNotMatch(preparePaste(text, false).text, /[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f]/)
  }
})

test('the whole end sequence goes, also its visible rest', () => {
  assert.equal(preparePaste(`a${END}b`, true).text, `\x1b[200~ab${END}`)
  assert.equal(preparePaste(`a${END}b`, false).text, 'ab')
})

test('line ends ask first where the program would run them', () => {
  assert.deepEqual(preparePaste('ls', false), { text: 'ls', content: 'ls', isAsked: false })
  assert.equal(preparePaste('ls\n', false).isAsked, true)
  assert.equal(preparePaste('a\r\nb', false).isAsked, true)
  assert.equal(preparePaste('a\nb', true).isAsked, false)
  assert.equal(preparePaste('a\nb', true).text, `\x1b[200~a\rb${END}`)
  assert.equal(preparePaste('', true).text, '')
  assert.equal(preparePaste('\x1b', false).text, '')
})

test('the question shows what is hidden, and no more than a few lines', () => {
  assert.equal(preview('a\r\u202eb'), 'a\n\\u{202e}b')
  const long = preview(Array(100).fill('x'.repeat(5000)).join('\r')).split('\n')
  assert.equal(long.length, 13)
  assert.match(long.at(-1), /88 more lines/)
  assert.ok(long.every((line) => line.length < 260))
})

test('a row is cut where the cursor is', () => {
  const parts = (output, cursor) => {
    const screen = new Screen(10, 2)
    screen.write(bytesOf(output))
    return rowParts(screen, screen.line(0), cursor).map(({ text, isCursor }) => (isCursor ? `<${text}>` : text))
  }
  assert.deepEqual(parts('abc', -1), ['abc'])
  assert.deepEqual(parts('abc', 0), ['<a>', 'bc'])
  assert.deepEqual(parts('abc', 1), ['a', '<b>', 'c'])
  assert.deepEqual(parts('abc', 2), ['ab', '<c>'])
  assert.deepEqual(parts('abc', 3), ['abc', '< >'])
  assert.deepEqual(parts('abc', 5), ['abc', '  ', '< >'])
  assert.deepEqual(parts('', 0), ['< >'])
  assert.deepEqual(parts('a界b', 1), ['a', '<界>', 'b'])
  assert.deepEqual(parts('a界b', 2), ['a', '<界>', 'b'])
  assert.deepEqual(parts('a\x1b[31mb', 1), ['a', '<b>'])
  assert.deepEqual(parts('\x1b[44mab\x1b[K', 5), ['ab', '   ', '< >', '    '].filter(Boolean))
})

test('colours beyond the sixteen', () => {
  assert.equal(cssColour(16), 'rgb(0,0,0)')
  assert.equal(cssColour(231), 'rgb(255,255,255)')
  assert.equal(cssColour(208), 'rgb(255,135,0)')
  assert.equal(cssColour(232), 'rgb(8,8,8)')
  assert.equal(cssColour(255), 'rgb(238,238,238)')
  assert.equal(cssColour(TRUE_COLOUR | 0x01fe80), '#01fe80')
})

test('how a shell ended', () => {
  assert.equal(ending({ exited: true, status: 'exit status 0' }), 'The shell has ended: exit status 0.')
  assert.equal(ending({ exitCode: 3 }), 'The shell has ended: exit status 3.')
  assert.equal(ending({ exitCode: { a: 1 }, status: '\u202e' }), 'The shell has ended: \\u{202e}.')
})

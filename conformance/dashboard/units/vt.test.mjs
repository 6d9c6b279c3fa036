// The terminal emulator: what xterm and the programs written for it do, and what hostile output must not do.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asset, bytesOf, numbers } from './assets.mjs'

const vt = await asset('vt.js')
const { BOLD, COLUMNS_MAX, DEFAULT, FAINT, HISTORY, INVERSE, ITALIC, ROWS_MAX, STRIKE, Screen, TRUE_COLOUR, UNDERLINE, widthOf } = vt

/** A screen after some output; bytes, or text. */
function after(output, columns = 10, rows = 4) {
  const screen = new Screen(columns, rows)
  screen.write(typeof output === 'string' ? bytesOf(output) : Uint8Array.from(output))
  return screen
}

const lines = (screen) => Array.from({ length: screen.rows }, (_, y) => screen.text(y))
const at = (screen) => [screen.cursor.x, screen.cursor.y]

/** Checks text and, where given, the cursor. */
function shows(output, expected, cursor, columns, rows) {
  const screen = after(output, columns, rows)
  const want = [...expected, ...Array(screen.rows - expected.length).fill('')]
  assert.deepEqual(lines(screen), want, JSON.stringify(output))
  if (cursor) assert.deepEqual(at(screen), cursor, JSON.stringify(output))
  return screen
}

test('text, line ends and the right edge', () => {
  shows('abc\r\ndef', ['abc', 'def'], [3, 1])
  shows('abc\ndef', ['abc', '   def'], [6, 1])
  shows('a\bb\x07', ['b'], [1, 0])
  // The cursor waits at the edge until another character comes.
  shows('0123456789', ['0123456789'], [9, 0])
  shows('0123456789a', ['0123456789', 'a'], [1, 1])
  shows('0123456789\ra', ['a123456789'], [1, 0])
  shows('0123456789\r\na', ['0123456789', 'a'], [1, 1])
  shows('0123456789\x1b[Da', ['01234567a9'])
  shows('0123456789\ta', ['0123456789', 'a'])
  shows('\x1b[?7l0123456789ab', ['012345678b'], [9, 0])
})

test('lines that continue another say so', () => {
  const screen = after('0123456789ab\r\nc')
  assert.deepEqual([0, 1, 2].map((y) => screen.line(y).wrapped), [true, false, false])
})

test('UTF-8, whole and split at every byte', () => {
  const text = 'é→界🙂ü'
  const bytes = bytesOf(text)
  for (let cut = 0; cut <= bytes.length; cut += 1) {
    const screen = new Screen(10, 2)
    screen.write(bytes.subarray(0, cut))
    screen.write(bytes.subarray(cut))
    assert.equal(screen.text(0), text)
    assert.deepEqual(at(screen), [7, 0])
  }
})

test('invalid UTF-8 is U+FFFD, as browsers decode it', () => {
  const cases = [
    [0x80], [0xff], [0xc0, 0xaf], [0xe0, 0x80, 0x80], [0xed, 0xa0, 0x80], [0xf4, 0x90, 0x80, 0x80], [0xf0, 0x9f, 0x98, 0x41], [0xc3, 0x28],
    [0xe2, 0x82, 0xe2, 0x82, 0xac], [0xf8, 0x88], [0xf0, 0x80, 0x41],
  ]
  for (const bytes of cases) assert.equal(after(bytes).text(0), new TextDecoder().decode(Uint8Array.from(bytes)), `${bytes}`)
  const next = numbers(7)
  for (let round = 0; round < 500; round += 1) {
    const bytes = Uint8Array.from({ length: 8 }, () => 0xa0 + next(0x60))
    // Characters that have no width are not on the screen, so they are compared where there are none.
    const text = new TextDecoder().decode(Uint8Array.of(...bytes, 0x2e))
    if ([...text].every((character) => widthOf(character.codePointAt(0)) > 0)) assert.equal(after([...bytes, 0x2e], 40).text(0), text)
  }
  // A sequence that begins inside a character.
  shows([0xe2, 0x82, 0x1b, 0x5b, 0x31, 0x47, 0x61], ['a'])
})

test('wide characters', () => {
  const screen = shows('界a', ['界a'], [3, 0])
  assert.deepEqual(screen.runs(screen.line(0)).map(({ x, text, width }) => [x, text, width]), [[0, '界', 2], [2, 'a', 1]])
  // Both halves go when one does.
  shows('界\x1b[1Ga', ['a'])
  shows('界\x1b[2Ga', [' a'])
  shows('a界b\x1b[3G\x1b[P', ['a b'])
  shows('界\x1b[2G\x1b[K', [''])
  shows('界界\x1b[2G\x1b[1K', ['  界'])
  // One that does not fit goes to the next line.
  shows('012345678界', ['012345678', '界'], [2, 1])
  shows('01234567界', ['01234567界'], [9, 0])
  assert.deepEqual(['a', '界', '한', 'Ａ', '🙂', 'é', '─', 'ｱ', '😀', '⌚'].map((text) => widthOf(text.codePointAt(0))), [1, 2, 2, 2, 2, 1, 1, 1, 2, 2])
})

test('marks join the character before, and are bounded', () => {
  shows('e\u0301x', ['e\u0301x'], [2, 0])
  shows('界\u0301', ['界\u0301'], [2, 0])
  shows('\u0301a', ['a'], [1, 0])
  assert.ok(after(`a${'\u0301'.repeat(1000)}b`).text(0).length < 20)
  shows('012345678é\u0301', ['012345678é\u0301'], [9, 0])
})

test('characters that reorder or hide text are not kept', () => {
  shows('a\u202eb\u2066c\u200bd\ufeff\u00ade\u{e0041}', ['abcde'], [5, 0])
  shows('a\u2028b', ['a\ufffdb'])
  // Nor are controls above U+007F, which older terminals take for sequences.
  shows('a\u009b31mb\u0085c', ['a31mbc'])
})

test('movement', () => {
  shows('\x1b[3;5Hx', ['', '', '    x'], [5, 2])
  shows('\x1b[Hx', ['x'])
  shows('\x1b[0;0Hx', ['x'])
  shows('\x1b[99;99Hx', ['', '', '', '         x'], [9, 3])
  shows('\x1b[2;2H\x1b[A\x1b[2Cx\x1b[D\x1b[Dy', ['  yx'])
  shows('\x1b[3B\x1b[5Gx\x1b[2Fy', ['', 'y', '', '    x'])
  shows('\x1b[2dx\x1b[Ey', ['', 'x', 'y'])
  shows('\x1b[99Ax\x1b[99Dy\x1b[99Bz', ['y', '', '', ' z'])
  shows('a\x1b[3ab\x1b[6`c', ['a   bc'])
  shows('\x1bDa\x1bEb\x1bMc', ['', 'ac', 'b'])
})

test('tab stops', () => {
  shows('\ta\tb', ['        a       b'], undefined, 30)
  shows('\t\x1b[Zx', ['x'], undefined, 30)
  shows('\x1b[3gx\ty', [`x${' '.repeat(28)}y`], undefined, 30)
  shows('\x1b[3g\x1b[5G\x1bH\r\tx', ['    x'], undefined, 30)
  shows('\x1b[9G\x1b[g\r\tx', [`${' '.repeat(16)}x`], undefined, 30)
  shows('\x1b[2Ix', [`${' '.repeat(16)}x`], undefined, 30)
})

test('erasing', () => {
  const filled = 'aaaaaaaaaa\r\nbbbbbbbbbb\r\ncccccccccc\x1b[2;5H'
  shows(`${filled}\x1b[K`, ['aaaaaaaaaa', 'bbbb', 'cccccccccc'], [4, 1])
  shows(`${filled}\x1b[1K`, ['aaaaaaaaaa', '     bbbbb', 'cccccccccc'])
  shows(`${filled}\x1b[2K`, ['aaaaaaaaaa', '', 'cccccccccc'])
  shows(`${filled}\x1b[J`, ['aaaaaaaaaa', 'bbbb'])
  shows(`${filled}\x1b[1J`, ['', '     bbbbb', 'cccccccccc'])
  shows(`${filled}\x1b[2J`, [], [4, 1])
  shows(`${filled}\x1b[3X`, ['aaaaaaaaaa', 'bbbb   bbb', 'cccccccccc'], [4, 1])
  shows(`${filled}\x1b[99X`, ['aaaaaaaaaa', 'bbbb', 'cccccccccc'])
})

test('characters are inserted, deleted and repeated', () => {
  shows('abcdef\x1b[3G\x1b[2@', ['ab  cdef'], [2, 0])
  shows('0123456789\x1b[3G\x1b[2@', ['01  234567'])
  shows('abcdef\x1b[3G\x1b[2P', ['abef'])
  shows('abcdef\x1b[3G\x1b[99P', ['ab'])
  shows('abc\x1b[1G\x1b[4hxy\x1b[4lz', ['xyzbc'])
  shows('a\x1b[3b', ['aaaa'])
  shows('─\x1b[3b', ['────'])
})

test('lines are inserted, deleted and scrolled, within the region', () => {
  const four = '1\r\n2\r\n3\r\n4'
  shows(`${four}\x1b[2H\x1b[L`, ['1', '', '2', '3'], [0, 1])
  shows(`${four}\x1b[2H\x1b[2M`, ['1', '4'])
  shows(`${four}\x1b[S`, ['2', '3', '4'])
  shows(`${four}\x1b[2T`, ['', '', '1', '2'])
  shows(`${four}\x1b[H\x1bM`, ['', '1', '2', '3'])
  shows(`${four}\x1b[2;3r\x1b[3H\n`, ['1', '3', '', '4'], [0, 2])
  shows(`${four}\x1b[2;3r\x1b[2H\x1bM`, ['1', '', '2', '4'])
  shows(`${four}\x1b[2;3r\x1b[2H\x1b[M`, ['1', '3', '', '4'])
  shows(`${four}\x1b[2;3r\x1b[4H\x1b[L\n\nx`, ['1', '2', '3', 'x'])
  shows(`${four}\x1b[2;3r\x1b[?6h\x1b[1;1Hx\x1b[9;1Hy`, ['1', 'x', 'y', '4'])
  shows(`${four}\x1b[3;2rx`, ['1', '2', '3', '4x'])
})

test('renditions', () => {
  const style = (output) => {
    const screen = after(`${output}x`)
    const { fg, bg, flags } = screen.runs(screen.line(0))[0].style
    return [fg, bg, flags]
  }
  const rgb = (red, green, blue) => TRUE_COLOUR | (red << 16) | (green << 8) | blue
  assert.deepEqual(style(''), [DEFAULT, DEFAULT, 0])
  assert.deepEqual(style('\x1b[1;31;42m'), [1, 2, BOLD])
  assert.deepEqual(style('\x1b[2;3;4;7;9m'), [DEFAULT, DEFAULT, FAINT | ITALIC | UNDERLINE | INVERSE | STRIKE])
  assert.deepEqual(style('\x1b[1;2;3;4;7m\x1b[22;23;24;27m'), [DEFAULT, DEFAULT, 0])
  assert.deepEqual(style('\x1b[31m\x1b[m'), [DEFAULT, DEFAULT, 0])
  assert.deepEqual(style('\x1b[31;41m\x1b[39;49m'), [DEFAULT, DEFAULT, 0])
  assert.deepEqual(style('\x1b[97;100m'), [15, 8, 0])
  assert.deepEqual(style('\x1b[38;5;200;48;5;16m'), [200, 16, 0])
  assert.deepEqual(style('\x1b[38;2;1;2;3;1m'), [rgb(1, 2, 3), DEFAULT, BOLD])
  assert.deepEqual(style('\x1b[38:2:1:2:3;1m'), [rgb(1, 2, 3), DEFAULT, BOLD])
  assert.deepEqual(style('\x1b[38:2::1:2:3;48:5:9m'), [rgb(1, 2, 3), 9, 0])
  assert.deepEqual(style('\x1b[4:3;31m'), [1, DEFAULT, UNDERLINE])
  assert.deepEqual(style('\x1b[4m\x1b[4:0m'), [DEFAULT, DEFAULT, 0])
  assert.deepEqual(style('\x1b[58;5;1;31m'), [1, DEFAULT, 0])
  assert.deepEqual(style('\x1b[38;5;999m\x1b[38;9;1m\x1b[38m'), [DEFAULT, DEFAULT, BOLD])
  // Those of other sequences are not renditions.
  assert.deepEqual(style('\x1b[>4;31m\x1b[?31m'), [DEFAULT, DEFAULT, 0])
})

test('erased cells have the background of now', () => {
  const screen = after('\x1b[44mab\x1b[K')
  assert.deepEqual(screen.runs(screen.line(0)).map(({ width, style }) => [width, style.bg]), [[2, 4], [8, 4]])
  const other = after('abc\x1b[41m\x1b[1G\x1b[P\x1b[m')
  assert.deepEqual(other.runs(other.line(0)).map(({ text, style }) => [text, style.bg]), [['bc       ', DEFAULT], [' ', 1]])
})

test('line drawing characters', () => {
  shows('\x1b(0lqk\x1b(Bq', ['┌─┐q'])
  shows('\x1b)0a\x0eq\x0fq', ['a─q'])
})

test('the alternate screen leaves the main one as it was', () => {
  shows('main\x1b[?1049h\x1b[Hother\x1b[?1049l!', ['main!'], [5, 0])
  const screen = shows('main\x1b[?1049h\x1b[2J\x1b[Hother', ['other'])
  assert.equal(screen.isAlternate, true)
  screen.write(bytesOf('\r\n'.repeat(50)))
  assert.equal(screen.historyLength, 0)
  screen.write(bytesOf('\x1b[?1049l'))
  assert.equal(screen.text(0), 'main')
  shows('a\x1b[?47hb\x1b[?47lc', ['a c'])
})

test('the cursor is saved and restored with its rendition', () => {
  const screen = shows('\x1b[2;3H\x1b[1m\x1b7\x1b[H\x1b[m\x1b8x', ['', '  x'])
  assert.equal(screen.runs(screen.line(1)).at(-1).style.flags, BOLD)
  shows('\x1b[2;3H\x1b[s\x1b[Ha\x1b[ub', ['a', '  b'])
  shows('ab\x1b8c', ['cb'])
})

test('modes that the page asks for', () => {
  const screen = new Screen(10, 4)
  const write = (text) => screen.write(bytesOf(text))
  const modes = () => [screen.cursorVisible, screen.applicationCursor, screen.bracketedPaste, screen.applicationKeypad]
  assert.deepEqual(modes(), [true, false, false, false])
  write('\x1b[?25l\x1b[?1;2004h\x1b=')
  assert.deepEqual(modes(), [false, true, true, true])
  write('\x1b[?25h\x1b[?1;2004l\x1b>')
  assert.deepEqual(modes(), [true, false, false, false])
  write('\x1b[?25l\x1b[?1;2004h\x1bcx')
  assert.deepEqual(modes(), [true, false, false, false])
  assert.deepEqual(lines(screen), ['x', '', '', ''])
})

test('the only replies are the state of the terminal, the cursor and the kind', () => {
  const reply = (output) => after(output, 80, 24).takeReplies()
  assert.equal(reply('\x1b[5n'), '\x1b[0n')
  assert.equal(reply('\x1b[3;7H\x1b[6n'), '\x1b[3;7R')
  assert.equal(reply('\x1b[3;7H\x1b[?6n'), '\x1b[?3;7R')
  assert.equal(reply('\x1b[c'), '\x1b[?62;22c')
  assert.equal(reply('\x1b[>c'), '\x1b[>0;0;0c')
  // Each of these was, in some terminal, a way to type what a program chose.
  const silent = [
    '\x1b]0;id\r\x07\x1b[21t', '\x1b]2;id\x07\x1b[20t', '\x1b]l\x07', '\x1bP$qm\x1b\\', '\x1bP$q"p\x1b\\', '\x1bP+q544e\x1b\\', '\x05', '\x1b[?2004$p', '\x1b[4$p',
    '\x1b]52;c;?\x07', '\x1b]4;1;?\x07', '\x1b]10;?\x1b\\', '\x1b]50;?\x07', '\x1b[>q', '\x1b[=c', '\x1b[18t', '\x1b[14t', '\x1b[x', '\x1b[?1;1S', '\x1bZ',
    '\x1b[?15n', '\x1b[?26n', '\x1bP1000p\x1b\\', '\x1b_Gi=1,a=q\x1b\\', '\x1b[?u', '\x1b]1337;ReportVariable=x\x07', '\x1b[1;1;1;1;1;1*y', '\x1b]3008;x\x07',
  ]
  for (const output of silent) assert.equal(reply(output), '', JSON.stringify(output))
  // However many are asked for.
  const many = reply('\x1b[6n'.repeat(100_000))
  assert.ok(many.length <= 1024)
  assert.match(many, /^(\x1b\[1;1R)+$/)
})

test('strings are swallowed, however they end', () => {
  shows('a\x1b]0;title\x07b', ['ab'])
  shows('a\x1b]0;title\x1b\\b', ['ab'])
  shows('a\x1bPq#0;2;0\x1b\\b', ['ab'])
  shows('a\x1b_x\x1b\\\x1b^x\x1b\\\x1bXx\x1b\\b', ['ab'])
  shows('a\x1b]0;ti\x1b[1mb', ['ab'])
  shows('a\x1b]0;ti\x18b', ['ab'])
  shows('a\x1b]8;;http://x/\x1b\\link\x1b]8;;\x1b\\', ['alink'])
  // One without an end does not hide everything for ever.
  const screen = after(`\x1b]0;${'x'.repeat(256 * 1024)}`)
  screen.write(bytesOf('\r\nseen'))
  assert.ok(lines(screen).includes('seen'))
})

test('sequences that are broken, unknown or too long do nothing', () => {
  shows('a\x1b[1;2;\x18b', ['ab'])
  shows('a\x1b[\x1b[31mb', ['ab'])
  shows('a\x1b[5\nCb', ['a', '      b'])
  shows(`a\x1b[${'1;'.repeat(500)}Cb`, ['ab'])
  shows(`a\x1b[${'9'.repeat(500)}Cb`, ['a        b'])
  shows('a\x1b[1 qb\x1b[?1000;1006;1004h\x1b[<1;2Mc\x1b[8;50;50td', ['abcd'])
  shows('a\x1b#8b\x1b%Gc', ['abc'])
})

test('lines that leave the screen are kept, so many and no more', () => {
  const screen = new Screen(10, 4)
  for (let line = 0; line < HISTORY * 2; line += 1) screen.write(bytesOf(`${line}\r\n`))
  assert.equal(screen.historyLength, HISTORY)
  assert.equal(screen.historyLine(HISTORY - 1).text(10), `${HISTORY * 2 - 4}`)
  assert.equal(screen.historyLine(0).text(10), `${HISTORY - 3}`)
  assert.equal(screen.scrolled, HISTORY * 2 - 3)
  screen.write(bytesOf('\x1b[3J'))
  assert.equal(screen.historyLength, 0)
  // Those that leave a region below the top, or are deleted, are not.
  const other = after('1\r\n2\r\n3\r\n4\x1b[2;4r\x1b[4H\n\n\x1b[r\x1b[H\x1b[M')
  assert.equal(other.historyLength, 0)
})

test('another size keeps the lines', () => {
  const screen = after('one\r\ntwo\r\nthree\r\nfour')
  screen.resize(10, 2)
  assert.deepEqual([lines(screen), at(screen), screen.historyLength], [['three', 'four'], [4, 1], 2])
  screen.resize(10, 4)
  assert.deepEqual([lines(screen), at(screen), screen.historyLength], [['one', 'two', 'three', 'four'], [4, 3], 0])
  screen.resize(3, 4)
  assert.deepEqual(lines(screen), ['one', 'two', 'thr', 'fou'])
  screen.resize(10, 6)
  assert.deepEqual(lines(screen), ['one', 'two', 'three', 'four', '', ''])
  // Blank lines at the end go first.
  const top = after('one')
  top.resize(10, 2)
  assert.deepEqual([lines(top), top.historyLength], [['one', ''], 0])
  // The main screen, too, while another is shown.
  const other = after('one\r\ntwo\r\nthree\r\nfour\x1b[?1049hx')
  other.resize(20, 2)
  other.resize(20, 5)
  other.write(bytesOf('\x1b[?1049l'))
  assert.deepEqual([lines(other), at(other)], [['one', 'two', 'three', 'four', ''], [4, 3]])
  // Sizes from anywhere.
  for (const [columns, rows] of [[0, 0], [-5, 1e9], [NaN, NaN], [1e9, -1], [2.5, 3.5]]) {
    screen.resize(columns, rows)
    assert.ok(screen.columns >= 2 && screen.columns <= COLUMNS_MAX && screen.rows >= 1 && screen.rows <= ROWS_MAX)
    screen.write(bytesOf('\x1b[999;999Hx界\n'))
  }
})

test('a line says that it changed', () => {
  const screen = after('a\r\nb')
  const before = [0, 1].map((y) => screen.line(y).touched)
  screen.write(bytesOf('c'))
  assert.equal(screen.line(0).touched, before[0])
  assert.notEqual(screen.line(1).touched, before[1])
})

/** What must hold after any output. */
function holds(screen) {
  const { x, y } = screen.cursor
  assert.ok(x >= 0 && x < screen.columns && y >= 0 && y < screen.rows, `${x} ${y}`)
  assert.ok(screen.historyLength <= HISTORY)
  for (let row = 0; row < screen.rows; row += 1) {
    const line = screen.line(row)
    assert.ok(line, `no line ${row}`)
    assert.equal(line.cells.length, line.styles.length)
    assert.ok(line.cells.length <= COLUMNS_MAX)
    let width = 0
    for (let column = 0; column < Math.min(line.cells.length, screen.columns); column += 1) {
      const text = line.cells[column]
      if (text === '') assert.ok(column > 0 && widthOf(line.cells[column - 1].codePointAt(0)) === 2, `half a character at ${column}`)
      else assert.ok(!/[\p{Cc}\p{Bidi_Control}\p{Zl}\p{Zp}]/u.test(text) && text.length <= 16, JSON.stringify(text))
    }
    for (const run of screen.runs(line)) {
      assert.equal(run.x, width)
      width += run.width
    }
    assert.ok(width <= screen.columns)
  }
}

const PIECES = [
  '\x1b[', '\x1b]', '\x1bP', '\x1b(0', '\x1b(B', '\x1b7', '\x1b8', '\x1bM', '\x1bD', '\x1bE', '\x1bH', '\x1bc', '\x1b#8', ';', ':', '?', '>', '!', ' ', '\x07', '\x1b\\',
  '\r', '\n', '\t', '\b', '\x0e', '\x0f', '\x18', '界', 'é', 'e\u0301', '🙂', '\u202e', '\u200d', '\ufe0f', 'text', '0123456789', '\x1b[?1049h', '\x1b[?1049l', '\x1b[?47h',
  '\x1b[?47l', '\x1b[4h', '\x1b[4l', '\x1b[?6h', '\x1b[?6l', '\x1b[?7l', '\x1b[?7h', '\x1b[41m', '\x1b[m', '\x1b[38;2;1;2;3m', '\x1b[2J', '\x1b[3J', '\x1b[6n', '\x1b[c',
].map(bytesOf)
const FINALS = '@ABCDEFGHIJKLMPSTXZ`abcdefghlmnrsu'

/** Output of a program that wants to do harm. */
function hostile(length, seed) {
  const next = numbers(seed)
  const out = new Uint8Array(length)
  let at = 0
  while (at < length) {
    const kind = next(10)
    let piece
    if (kind < 4) piece = PIECES[next(PIECES.length)]
    else if (kind < 8) {
      const count = next(4)
      const parameters = Array.from({ length: count }, () => [next(12), next(200), 99999][next(3)])
      piece = bytesOf(`\x1b[${parameters.join(';')}${FINALS[next(FINALS.length)]}`)
    } else piece = Uint8Array.from({ length: next(6) }, () => next(256))
    piece = piece.subarray(0, length - at)
    out.set(piece, at)
    at += piece.length
  }
  return out
}

/** Milliseconds of a processor, of which other programs take none. */
function spentSince(before) {
  const { user, system } = process.cpuUsage(before)
  return (user + system) / 1000
}

test('a mebibyte of hostile output leaves a screen that holds, in bounded time and memory', () => {
  for (const [seed, length] of [[1, 1 << 20], [2, 1 << 18], [3, 1 << 18]]) {
    const next = numbers(seed)
    const screen = new Screen(80, 24)
    const output = hostile(length, seed)
    let spent = 0
    for (let at = 0; at < output.length; ) {
      const size = 1 + next(4096)
      const before = process.cpuUsage()
      screen.write(output.subarray(at, at + size))
      if (next(20) === 0) screen.resize(1 + next(200), 1 + next(60))
      spent += spentSince(before)
      at += size
      holds(screen)
      assert.ok(screen.takeReplies().length <= 1024)
    }
    assert.ok(spent < 15_000, `${spent} ms`)
  }
})

test('the same output is the same screen, however it is split', () => {
  const output = hostile(20_000, 9)
  const whole = new Screen(40, 12)
  whole.write(output)
  const split = new Screen(40, 12)
  for (const byte of output) split.write(Uint8Array.of(byte))
  assert.deepEqual(lines(split), lines(whole))
  assert.deepEqual(at(split), at(whole))
})

test('no sequence is dear: 256 KiB of each, on a large screen', () => {
  const worst = [
    '\x1b[M', '\x1b[99L', '\x1b[2J', '\x1b[99S', '\x1b[99T', '\x1b[@', '\x1b[999P', '\x1b[999X', '\x1b[1K', '\x1b[44m\x1b[K\x1b[45m\x1b[999G\x1b[K\x1b[G', '\n', '\x1bM', 'a\x1b[999b',
    '\x1b[?1049h\x1b[?1049l', '\x1b[999I', '\x1b[999Z', '\x1b[4ha', '界', 'a\u0301', '\x1b[1;2;3;4;5;6;7;8;9m', `\x1b[${'1;'.repeat(31)}m`, '\x1b]', '\x1b[6n', '\x1b7\x1b8', '\x1bc', '\x1b[3J\n',
  ]
  for (const sequence of worst) {
    const piece = bytesOf(sequence)
    const output = new Uint8Array(1 << 18)
    for (let at = 0; at + piece.length <= output.length; at += piece.length) output.set(piece, at)
    const screen = new Screen(200, 60)
    const before = process.cpuUsage()
    screen.write(output)
    const spent = spentSince(before)
    assert.ok(spent < 5000, `${JSON.stringify(sequence)}: ${spent} ms`)
    if (process.env.VERBOSE) console.log(JSON.stringify(sequence), Math.round(spent), 'ms')
    holds(screen)
  }
})

test('memory does not grow with output', () => {
  const screen = new Screen(80, 24)
  const output = hostile(1 << 18, 5)
  const text = bytesOf(`${'x'.repeat(79)}\r\n`.repeat(3000))
  screen.write(text)
  const used = () => {
    globalThis.gc?.()
    return process.memoryUsage().heapUsed
  }
  const before = used()
  for (let round = 0; round < 8; round += 1) {
    screen.write(output)
    screen.write(text)
  }
  // Without `--expose-gc` what was not collected yet counts as well.
  assert.ok(used() - before < 200 * 1024 * 1024, `${used() - before}`)
})

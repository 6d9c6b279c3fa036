// Hostile names: what is shown has no character that hides, reorders or breaks, and no two names look alike.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asset } from './assets.mjs'

const { shown, shownLines } = await asset('text.js')

const HOSTILE = [
  ['\0', '\\0'],
  ['a\nb', 'a\\nb'],
  ['a\r\nb', 'a\\r\\nb'],
  ['a\tb', 'a\\tb'],
  ['\x1b[2J', '\\x1b[2J'],
  ['\x1b]0;title\x07', '\\x1b]0;title\\x07'],
  ['\x7f', '\\x7f'],
  ['\x85', '\\x85'],
  ['\x9b31m', '\\x9b31m'],
  ['a\u00a0b', 'a\\xa0b'],
  ['a\u00adb', 'a\\xadb'],
  ['photo\u202egpj.exe', 'photo\\u{202e}gpj.exe'],
  ['\u202aa\u202c', '\\u{202a}a\\u{202c}'],
  ['\u202da', '\\u{202d}a'],
  ['\u2066a\u2069', '\\u{2066}a\\u{2069}'],
  ['\u2067\u2068', '\\u{2067}\\u{2068}'],
  ['\u200e\u200f\u061c', '\\u{200e}\\u{200f}\\u{61c}'],
  ['a\u200bb', 'a\\u{200b}b'],
  ['a\u200c\u200db', 'a\\u{200c}\\u{200d}b'],
  ['a\u2060b', 'a\\u{2060}b'],
  ['\ufeffa', '\\u{feff}a'],
  ['a\u2028b\u2029', 'a\\u{2028}b\\u{2029}'],
  ['\u3000\u2003', '\\u{3000}\\u{2003}'],
  ['a\u3164', 'a\\u{3164}'],
  ['\u115f\u1160\uffa0', '\\u{115f}\\u{1160}\\u{ffa0}'],
  ['\u2800', '\\u{2800}'],
  ['a\ufe0f', 'a\\u{fe0f}'],
  ['a\u{e0100}', 'a\\u{e0100}'],
  ['a\u{e0041}\u{e007f}', 'a\\u{e0041}\\u{e007f}'],
  ['a\u034fb', 'a\\u{34f}b'],
  ['\ud800', '\\u{d800}'],
  ['\udfffa', '\\u{dfff}a'],
  ['\ue000', '\\u{e000}'],
  ['\uffff', '\\u{ffff}'],
  ['\u{10ffff}', '\\u{10ffff}'],
  ['\\u{202e}', '\\\\u{202e}'],
  ['\\', '\\\\'],
  [' a', '\\x20a'],
  ['a ', 'a\\x20'],
  ['a  b', 'a\\x20\\x20b'],
  [' ', '\\x20'],
  ['\u0301a', '\\u{301}a'],
  [`a${'\u0301'.repeat(5)}`, `a${'\u0301'.repeat(3)}\\u{301}\\u{301}`],
  ['<img src=x onerror=alert(1)>', '<img src=x onerror=alert(1)>'],
  ['</script><script>', '</script><script>'],
  ["'\"><svg/onload=1>", "'\"><svg/onload=1>"],
  ['javascript:alert(1)', 'javascript:alert(1)'],
  ['\u{1d173}', '\\u{1d173}'],
  ['\ufff9\ufffb', '\\u{fff9}\\u{fffb}'],
]

test('hostile names', () => {
  assert.ok(HOSTILE.length >= 40)
  for (const [name, expected] of HOSTILE) assert.equal(shown(name), expected)
})

test('names of people stay as they are', () => {
  for (const name of ['report.txt', 'a b.txt', 'Überblick.md', 'naïve', 'e\u0301', 'отчёт', 'שלום.txt', 'ملف', '报告', 'レポート', '🙂.png', 'สวัสดี']) {
    assert.equal(shown(name), name)
  }
})

test('no character is hidden in what is shown, whatever the name', () => {
  const hidden = /[\p{C}\p{Zl}\p{Zp}\p{Bidi_Control}\p{Default_Ignorable_Code_Point}]/u
  const seen = new Map()
  // Planes without any character, and those for private use, have one rule for each: a part of them, and their ends, is enough.
  const isUniform = (code) => (code >= 0x40000 && code < 0xe0000) || code >= 0xf0000
  const isEnd = (code) => (code & 0xffff) < 16 || (code & 0xffff) > 0xffef
  for (let code = 0; code <= 0x10ffff; code += 1) {
    if (isUniform(code) && code % 31 !== 0 && !isEnd(code)) continue
    const out = shown(String.fromCodePoint(code))
    if (hidden.test(out) || out === '') assert.fail(`U+${code.toString(16)} is shown as ${JSON.stringify(out)}`)
    if (seen.has(out)) assert.fail(`U+${code.toString(16)} looks like U+${seen.get(out).toString(16)}`)
    seen.set(out, code)
  }
})

test('what is not a string is shown as well', () => {
  assert.equal(shown(undefined), '')
  assert.equal(shown(null), '')
  assert.equal(shown(5), '5')
  assert.equal(shown({ toString: 1 }), '{"toString":1}')
})

test('long names are cut, and the cut is said', () => {
  assert.equal(shown('a'.repeat(20), 10), `${'a'.repeat(10)}… (10 more characters)`)
  assert.equal(shown('🙂🙂', 3), '🙂\\u{d83d}… (1 more characters)')
})

test('lines keep their ends and tabs, and nothing else that is hidden', () => {
  assert.equal(shownLines('a\tb\r\n  c\\d\n\u202e\x1b[1m\u2028'), 'a\tb\n  c\\d\n\\u{202e}\\x1b[1m\\u{2028}')
  assert.equal(shownLines('if (admin\u2066) \u2069{'), 'if (admin\\u{2066}) \\u{2069}{')
})

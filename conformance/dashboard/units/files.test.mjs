// Paths, names, listings and contents of the file browser.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { asset } from './assets.mjs'

const { SHOWN_MAX, fileUrl, joined, listed, nameProblem, parentOf, pieces, sizeText, textOfFile } = await asset('files.js')

test('paths', () => {
  assert.equal(joined('/', 'a'), '/a')
  assert.equal(joined('/a', 'b c'), '/a/b c')
  assert.equal(joined('/a/', 'b'), '/a/b')
  for (const [path, parent] of [['/', '/'], ['/a', '/'], ['/a/b', '/a'], ['/a/b/', '/a'], ['//', '/']]) assert.equal(parentOf(path), parent)
})

test('names that are none', () => {
  for (const name of ['', '.', '..', 'a/b', '/', '../x', 'a\0b', 'x'.repeat(256), 'ü'.repeat(128)]) assert.notEqual(nameProblem(name), '', name)
  for (const name of ['a', '...', '.a', ' ', '\n', '-rf', 'x'.repeat(255), 'ü'.repeat(127), '\u202e']) assert.equal(nameProblem(name), '', name)
})

test('an address holds any path', () => {
  const url = fileUrl('/dashboard/agent/i1', '/a b/&path=/etc#?%2e\n+ü', 'ro&ot')
  const query = new URL(url, 'http://h').searchParams
  assert.deepEqual([...query], [['path', '/a b/&path=/etc#?%2e\n+ü'], ['username', 'ro&ot']])
  assert.equal(fileUrl('/x', '/a', ''), '/x/files?path=%2Fa')
})

const entry = (name, type = 'FILE_TYPE_FILE') => ({ name, type, path: `/elsewhere/${name}` })

test('a listing is sorted and bounded', () => {
  const entries = [entry('b'), entry('a'), entry('z', 'FILE_TYPE_DIRECTORY'), entry('socket', 'FILE_TYPE_UNSPECIFIED')]
  assert.deepEqual(listed({ entries }).entries.map(({ name, isDirectory, isFile }) => [name, isDirectory, isFile]), [
    ['z', true, false], ['a', false, true], ['b', false, true], ['socket', false, false],
  ])
  const many = listed({ entries: Array.from({ length: SHOWN_MAX + 7 }, (_, at) => entry(`f${at}`)) })
  assert.deepEqual([many.entries.length, many.more], [SHOWN_MAX, 7])
})

test('an answer that is not a listing has no entries, and a name that is a path none', () => {
  for (const answer of [null, undefined, {}, { entries: 'x' }, { entries: [null, 5, {}, { name: 5 }, entry('../etc'), entry('..'), entry('')] }]) {
    assert.deepEqual(listed(answer), { entries: [], more: 0 })
  }
})

test('sizes', () => {
  const cases = [[undefined, '0 B'], ['5', '5 B'], ['1023', '1023 B'], ['1024', '1.0 KiB'], ['1572864', '1.5 MiB'], ['9223372036854775807', '8388608.0 TiB'], ['-1', '0 B'], ['<b>', '0 B'], [{}, '0 B'], [7, '7 B']]
  for (const [size, expected] of cases) assert.equal(sizeText(size), expected)
})

test('what is text', () => {
  const bytes = (text) => new TextEncoder().encode(text)
  assert.equal(textOfFile(bytes('a\nü界'), false), 'a\nü界')
  assert.equal(textOfFile(bytes(''), false), '')
  assert.equal(textOfFile(bytes('a\0b'), false), null)
  assert.equal(textOfFile(Uint8Array.of(0xff, 0xfe), false), null)
  // A cut may go through a character.
  assert.equal(textOfFile(bytes('a界').subarray(0, 3), true), 'a')
  assert.equal(textOfFile(bytes('a界').subarray(0, 3), false), null)
})

test('a long line is shown in pieces that are the line', () => {
  const texts = ['', 'a', 'x'.repeat(4000), 'x'.repeat(4001), `a\n${'x'.repeat(8000)}\nb\n`, `${'x'.repeat(3999)}${'🙂'.repeat(3000)}\n`, '\n'.repeat(9000), `${'y'.repeat(9001)}\n${'z'.repeat(12_000)}`]
  for (const text of texts) {
    const parts = pieces(text)
    assert.equal(parts.map((part) => part.text).join(''), text)
    for (const part of parts) {
      assert.ok(part.text !== '' && part.text.isWellFormed())
      assert.ok(part.text.split('\n').every((line) => line.length <= 4001))
      // The end of a line is that of its last block, which is no line of its own.
      assert.ok(!part.isBlock || part.text !== '\n')
    }
  }
  assert.deepEqual(pieces('a\nb').map((part) => part.isBlock), [false])
  assert.deepEqual(pieces(`a\n${'x'.repeat(8000)}\nb`).map((part) => part.isBlock), [false, true, true, false])
})

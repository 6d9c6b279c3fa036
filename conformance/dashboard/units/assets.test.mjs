// Rules for every file of the dashboard's assets: no markup from text, no code from text, nothing of other origins.

import assert from 'node:assert/strict'
import { readdirSync, readFileSync } from 'node:fs'
import { test } from 'node:test'
import { ASSETS } from './assets.mjs'

const files = readdirSync(ASSETS, { recursive: true, withFileTypes: true })
  .filter((file) => file.isFile() && /\.(m?js|css|html|svg)$/.test(file.name))
  .map((file) => `${file.parentPath ?? file.path}/${file.name}`)
const MARKUP =
  /\b(innerHTML|outerHTML|insertAdjacentHTML|setHTMLUnsafe|parseHTMLUnsafe|srcdoc|createContextualFragment|DOMParser)\b|document\.write|\beval\b|\bFunction\s*\(|set(Timeout|Interval)\(\s*['"`]|setAttribute\(\s*['"`](on|style)/
const ELSEWHERE = /(https?|wss?):\/\/(?!www\.w3\.org\/)|@import/

test('the assets have no way from text to markup or code', () => {
  assert.ok(files.length >= 7, `${files}`)
  for (const file of files) {
    readFileSync(file, 'utf8').split('\n').forEach((line, at) => {
      assert.doesNotMatch(line, MARKUP, `${file}:${at + 1}`)
      assert.doesNotMatch(line, ELSEWHERE, `${file}:${at + 1}`)
    })
  }
})

test('modules import each other by relative names only', () => {
  for (const file of files.filter((name) => name.endsWith('js'))) {
    for (const [, name] of readFileSync(file, 'utf8').matchAll(/^import .* from '(.*)'$/gm)) assert.match(name, /^\.\/[a-z0-9_-]+\.js$/)
  }
})

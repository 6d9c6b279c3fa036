// Prints the rows of a screen after the output on standard input, and where the cursor is: `show.mjs COLUMNS ROWS`.

import { readFileSync } from 'node:fs'
import { asset } from './assets.mjs'

const { Screen } = await asset('vt.js')
const [columns, rows] = process.argv.slice(2).map(Number)
const screen = new Screen(columns, rows)
screen.write(readFileSync(0))
for (let y = 0; y < rows; y += 1) console.log(screen.text(y))
console.log(`${screen.cursor.x} ${screen.cursor.y}`)

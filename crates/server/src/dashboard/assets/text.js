// Hostile text as visible text: names of files, metadata, messages of programs in a sandbox.
//
// Whoever controls a sandbox chooses these strings, and a page that shows them must not be made to say anything but
// what is there: a name that ends in a right-to-left override reads as another name, an invisible character makes two names
// look the same, a line end draws a second row. Such characters are shown as escapes, and a backslash as two, so that no
// two strings look alike. Nothing here makes markup: callers put the result in `textContent`.

// What most callers show of one string: more than any file name, less than what slows a page down.
export const LONGEST = 1024

// Marks that may follow one letter. Some scripts use three; more only paint over the lines above and below.
const MARKS = 3

// Control, format, private, unassigned and lone surrogate characters (C), every space but the usual one (Z), and what
// Unicode itself says to draw as nothing. The Braille blank is a symbol to Unicode, and looks like a space.
const HIDDEN = /[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/u
const MARK = /\p{M}/u
const SHORT = new Map([['\n', '\\n'], ['\t', '\\t'], ['\r', '\\r'], ['\0', '\\0'], ['\\', '\\\\']])

/** An escape as JavaScript writes it: `\x1b` or `\u{202e}`. */
function escaped(character) {
  const short = SHORT.get(character)
  if (short) return short
  const code = character.codePointAt(0)
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, '0')}` : `\\u{${code.toString(16)}}`
}

/** Text of whatever an answer had in the place of a string. */
function textOf(value) {
  if (typeof value === 'string') return value
  if (value === undefined || value === null) return ''
  return typeof value === 'object' ? JSON.stringify(value) : String(value)
}

/** Escapes what `isKept` does not keep; `limit` is in UTF-16 units of the input. */
function escapeAll(text, limit, isKept) {
  const cut = text.length > limit ? text.slice(0, limit) : text
  let out = ''
  // A mark at the beginning would join what stands before the text on the page.
  let marks = MARKS
  for (const character of cut) {
    if (character > ' ' && character < '\x7f' && character !== '\\') {
      // Most of most texts.
      out += character
      marks = 0
    } else if (isKept(character)) {
      out += character
      marks = character === '\n' ? MARKS : 0
    } else if (MARK.test(character) && !HIDDEN.test(character)) {
      out += marks < MARKS ? character : escaped(character)
      marks += 1
    } else {
      out += HIDDEN.test(character) || character === '\\' ? escaped(character) : character
      marks = 0
    }
  }
  return cut.length < text.length ? `${out}… (${text.length - cut.length} more characters)` : out
}

/**
 * One line that shows every character of a name. Spaces at either end, and all but the first of several, are escapes too:
 * pages collapse them.
 */
export function shown(name, limit = LONGEST) {
  const spaced = escapeAll(textOf(name), limit, (character) => character === ' ')
  return spaced.replace(/^ +| +$| {2,}/gu, (spaces) => '\\x20'.repeat(spaces.length))
}

/** Several lines of text, as of a file: line ends and tabs stay, everything else that is hidden is an escape. */
export function shownLines(text, limit = Infinity) {
  const lines = textOf(text).replaceAll('\r\n', '\n')
  // Backslashes are common in files and stay single: these lines are read, not told apart.
  return escapeAll(lines, limit, (character) => character === ' ' || character === '\n' || character === '\t' || character === '\\')
}

/**
 * An element with children; strings are text, never markup. Names in `properties` that begin with `on` are listeners, those
 * with a hyphen and `role` are attributes, the others are properties of the element.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (name.includes('-') || name === 'role') element.setAttribute(name, value)
    else element[name] = value
  }
  element.append(...children)
  return element
}

/** An element with the name of something, whose text cannot reorder what stands beside it. */
export function nameElement(name, limit = LONGEST) {
  return make('bdi', { textContent: shown(name, limit) })
}

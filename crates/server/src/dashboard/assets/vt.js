// A terminal emulator without a page: bytes of a program go in, lines of cells come out. `terminal.js` draws them.
//
// It follows what programs expect of TERM=xterm-256color. The bytes are hostile: whoever wrote a file that another person shows
// with `cat` chose them. Hence these rules:
// - Work is bounded by the length of the input times the width or the height of the screen, and memory by the size of the
//   screen and `HISTORY` lines. Parameters, strings and marks on one cell have limits; whole lines are erased lazily.
// - The terminal sends to the program only what no program can choose: the state of the terminal is always well, where the
//   cursor is, and which kind of terminal this is. Titles, clipboards, colours, and settings (DECRQSS, DECRQM, XTGETTCAP,
//   answerback) are never reported, because text that comes back as if typed is a command.
// - Control characters above U+007F do nothing, and characters that reorder or hide text are not kept.

// Lines that are kept when they leave the screen at its top.
export const HISTORY = 2000
export const COLUMNS_MAX = 1000
export const ROWS_MAX = 500
// History is cut in steps, so that a line costs the same however many there are.
const HISTORY_SLACK = 500
const PARAMETERS_MAX = 32
const PARAMETER_MAX = 65535
// A string that has no end (OSC, DCS, ...) ends here, so that text is seen again.
const STRING_MAX = 256 * 1024
// UTF-16 units in one cell: a character and its marks.
const CELL_MAX = 16
// Bytes of replies that wait for `takeReplies`.
const REPLIES_MAX = 1024

export const BOLD = 1
export const FAINT = 2
export const ITALIC = 4
export const UNDERLINE = 8
export const INVERSE = 16
export const HIDDEN = 32
export const STRIKE = 64
// A colour is DEFAULT, a number of the palette, or TRUE_COLOUR with red, green and blue.
export const DEFAULT = -1
export const TRUE_COLOUR = 0x1000000

// Pairs of first and last; emoji come from the properties of Unicode below.
const WIDE = [
  0x1100, 0x115f, 0x2329, 0x232a, 0x2e80, 0x303e, 0x3041, 0x3247, 0x3250, 0x4dbf, 0x4e00, 0xa4cf, 0xa960, 0xa97c,
  0xac00, 0xd7a3, 0xf900, 0xfaff, 0xfe10, 0xfe19, 0xfe30, 0xfe6f, 0xff01, 0xff60, 0xffe0, 0xffe6, 0x16fe0, 0x1b2ff,
  0x1f200, 0x1f251, 0x20000, 0x2fffd, 0x30000, 0x3fffd,
]
const EMOJI = /^\p{Emoji_Presentation}$/u
const REGIONAL = /^\p{Regional_Indicator}$/u
const MARK = /^[\p{Mn}\p{Me}\u200c\u200d\u1160-\u11ff]$/u
const FORMAT = /^[\p{Cf}\p{Default_Ignorable_Code_Point}]$/u
const SEPARATOR = /^[\p{Zl}\p{Zp}]$/u

const ASCII = Array.from({ length: 128 }, (_, code) => String.fromCharCode(code))
// What the set of line drawing characters has from ` to ~.
const DRAWING = [...'◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·']

const widths = new Map()
/** Columns of a character: 0 for a mark, -1 for what is not kept. */
export function widthOf(code) {
  if (code < 0x300) return code === 0xad ? -1 : 1
  let width = widths.get(code)
  if (width === undefined) {
    width = computedWidth(code)
    // Bounded: a program may print every character there is.
    if (widths.size >= 4096) widths.clear()
    widths.set(code, width)
  }
  return width
}

function computedWidth(code) {
  const character = String.fromCodePoint(code)
  if (MARK.test(character)) return 0
  if (FORMAT.test(character)) return code >= 0xfe00 && code <= 0xfe0f ? 0 : -1
  for (let at = 0; at < WIDE.length && WIDE[at] <= code; at += 2) if (code <= WIDE[at + 1]) return 2
  return EMOJI.test(character) && !REGIONAL.test(character) ? 2 : 1
}

/** How a cell looks. Never changed once it is made, so that cells share it. */
const PLAIN = Object.freeze({ fg: DEFAULT, bg: DEFAULT, flags: 0 })

export function sameStyle(one, other) {
  return one === other || (one.fg === other.fg && one.bg === other.bg && one.flags === other.flags)
}

/** Cells of one row. Those beyond the length of `cells` are blank, with the style `fill`. */
class Line {
  constructor(fill, touched) {
    // A wide character has the empty string after it.
    this.cells = []
    this.styles = []
    this.fill = fill
    // Whether the next line continues it.
    this.wrapped = false
    // Differs after each change, for those who draw.
    this.touched = touched
  }

  extend(length) {
    while (this.cells.length < length) {
      this.cells.push(' ')
      this.styles.push(this.fill)
    }
  }

  cut(length) {
    if (this.cells.length <= length) return
    this.cells.length = length
    this.styles.length = length
    // Half of a wide character is none.
    if (length > 0 && isWideText(this.cells[length - 1])) this.cells[length - 1] = ' '
  }

  /** Makes halves of wide characters blank where something is about to begin. */
  split(at) {
    if (this.cells[at] !== '') return
    this.cells[at] = ' '
    if (at > 0) this.cells[at - 1] = ' '
  }

  erase(from, to, columns, fill) {
    this.split(from)
    if (to < columns) this.split(to)
    if (to >= columns) {
      if (!sameStyle(this.fill, fill)) this.extend(from)
      if (this.cells.length > from) {
        this.cells.length = from
        this.styles.length = from
      }
      this.fill = fill
      this.wrapped = false
    } else {
      this.extend(to)
      this.cells.fill(' ', from, to)
      this.styles.fill(fill, from, to)
    }
  }

  insert(at, count, columns, fill) {
    this.split(at)
    this.cut(columns)
    this.extend(at)
    this.cells.splice(at, 0, ...Array(count).fill(' '))
    this.styles.splice(at, 0, ...Array(count).fill(fill))
    this.cut(columns)
  }

  delete(at, count, columns, fill) {
    this.split(at)
    this.split(at + count)
    this.cut(columns)
    // What comes in at the right end has the colour of now, not the one that the line was erased with.
    if (!sameStyle(this.fill, fill)) this.extend(columns)
    this.cells.splice(at, count)
    this.styles.splice(at, count)
    this.fill = fill
  }

  /** Text of the line without the blanks at its end. */
  text(columns) {
    return this.cells.slice(0, columns).join('').trimEnd()
  }
}

function isWideText(text) {
  return text !== '' && widthOf(text.codePointAt(0)) === 2
}

// States of the parser.
const GROUND = 0
const ESCAPE = 1
const ESCAPE_MORE = 2
const CSI = 3
const CSI_IGNORED = 4
const STRING = 5
const STRING_ESCAPE = 6

function clamp(value, least, most) {
  return value < least ? least : value > most ? most : value
}

/** The screen of a terminal, and the lines that have left it. */
export class Screen {
  columns
  rows
  cursor = { x: 0, y: 0 }
  cursorVisible = true
  applicationCursor = false
  applicationKeypad = false
  bracketedPaste = false
  isAlternate = false
  // Lines that have ever left the screen, for those who draw.
  scrolled = 0

  #lines = []
  #history = []
  // Lines of the main screen while the alternate one is shown.
  #main = null
  #saved = new Map()
  #style = PLAIN
  #blank = PLAIN
  #pendingWrap = false
  #top = 0
  #bottom = 0
  #origin = false
  #autowrap = true
  #insert = false
  #newline = false
  #tabs = []
  #drawing = [false, false]
  #shift = 0
  #last = null
  #changes = 0
  #replies = ''

  #state = GROUND
  #prefix = ''
  #intermediate = ''
  #parameters = []
  // For each parameter whether a colon stands before it.
  #colons = []
  #length = 0
  #endsByBell = false

  #needed = 0
  #code = 0
  #lower = 0x80
  #upper = 0xbf

  constructor(columns, rows) {
    this.columns = clamp(Math.trunc(columns) || 80, 2, COLUMNS_MAX)
    this.rows = clamp(Math.trunc(rows) || 24, 1, ROWS_MAX)
    this.#reset()
  }

  // What is drawn.

  /** A line of the screen. */
  line(y) {
    return this.#lines[y]
  }

  /** How many lines are above the screen. */
  get historyLength() {
    return Math.min(this.#history.length, HISTORY)
  }

  /** A line above the screen; 0 is the oldest. */
  historyLine(at) {
    return this.#history[this.#history.length - this.historyLength + at]
  }

  /** Text of a line of the screen, without the blanks at its end. */
  text(y) {
    return this.#lines[y].text(this.columns)
  }

  /** Parts of a line that look the same: `{ x, text, width, style }`, without blanks at the end that look like nothing. */
  runs(line) {
    const runs = []
    const length = Math.min(line.cells.length, this.columns)
    let run = null
    for (let x = 0; x < length; x += 1) {
      const text = line.cells[x]
      if (text === '') {
        if (run) run.width += 1
        continue
      }
      const style = line.styles[x]
      // Others may be drawn in another font, so that only a cell of their own has the right width.
      const isAscii = text.length === 1 && text < '\x7f'
      if (run && run.isAscii && isAscii && sameStyle(run.style, style)) {
        run.text += text
        run.width += 1
      } else {
        run = { x, text, width: 1, style, isAscii }
        runs.push(run)
      }
    }
    if (length < this.columns && line.fill.bg !== DEFAULT) {
      runs.push({ x: length, text: ' '.repeat(this.columns - length), width: this.columns - length, style: line.fill, isAscii: true })
    }
    return runs
  }

  /** What the terminal answers to the program since the last call. */
  takeReplies() {
    const replies = this.#replies
    this.#replies = ''
    return replies
  }

  // What is written.

  /** Takes bytes of the program; characters and sequences may be split anywhere. */
  write(bytes) {
    for (let at = 0; at < bytes.length; at += 1) {
      const byte = bytes[at]
      if (this.#needed > 0) {
        if (byte >= this.#lower && byte <= this.#upper) {
          this.#code = (this.#code << 6) | (byte & 0x3f)
          this.#lower = 0x80
          this.#upper = 0xbf
          this.#needed -= 1
          if (this.#needed === 0) this.#take(this.#code)
          continue
        }
        this.#needed = 0
        this.#lower = 0x80
        this.#upper = 0xbf
        this.#take(0xfffd)
      }
      if (byte < 0x80) {
        if (this.#state === GROUND && byte >= 0x20 && byte < 0x7f) this.#printAscii(byte)
        else this.#take(byte)
      } else this.#lead(byte)
    }
  }

  /** The first byte of a character of several. */
  #lead(byte) {
    if (byte >= 0xc2 && byte <= 0xdf) {
      this.#needed = 1
      this.#code = byte & 0x1f
    } else if (byte >= 0xe0 && byte <= 0xef) {
      this.#needed = 2
      this.#code = byte & 0xf
      // Neither longer than necessary nor a surrogate.
      if (byte === 0xe0) this.#lower = 0xa0
      if (byte === 0xed) this.#upper = 0x9f
    } else if (byte >= 0xf0 && byte <= 0xf4) {
      this.#needed = 3
      this.#code = byte & 0x7
      if (byte === 0xf0) this.#lower = 0x90
      if (byte === 0xf4) this.#upper = 0x8f
    } else this.#take(0xfffd)
  }

  #take(code) {
    if (this.#state === STRING || this.#state === STRING_ESCAPE) return this.#inString(code)
    if (code === 0x1b) {
      this.#state = ESCAPE
      this.#prefix = ''
      this.#intermediate = ''
      return
    }
    if (code === 0x18 || code === 0x1a) {
      this.#state = GROUND
      return
    }
    if (code < 0x20) return this.#control(code)
    if (code === 0x7f) return
    switch (this.#state) {
      case GROUND:
        return this.#printCode(code)
      case ESCAPE:
      case ESCAPE_MORE:
        return this.#escape(code)
      default:
        return this.#csi(code)
    }
  }

  /** Strings are swallowed: titles, colours, clipboards, hyperlinks, pictures, requests for settings. */
  #inString(code) {
    this.#length += 1
    if (code === 0x18 || code === 0x1a || (code === 7 && this.#endsByBell) || this.#length > STRING_MAX) this.#state = GROUND
    else if (code === 0x1b) this.#state = STRING_ESCAPE
    else if (this.#state === STRING_ESCAPE) {
      this.#state = ESCAPE
      this.#prefix = ''
      this.#intermediate = ''
      // With a backslash, the end of the string; otherwise the string was broken off by the next sequence.
      if (code === 0x5c) this.#state = GROUND
      else this.#take(code)
    }
  }

  #control(code) {
    switch (code) {
      case 8:
        this.#pendingWrap = false
        if (this.cursor.x > 0) this.cursor.x -= 1
        break
      case 9:
        this.#tab(1)
        break
      case 10:
      case 11:
      case 12:
        this.#index()
        if (this.#newline) this.cursor.x = 0
        break
      case 13:
        this.#pendingWrap = false
        this.cursor.x = 0
        break
      case 14:
      case 15:
        this.#shift = code === 14 ? 1 : 0
        break
      default:
    }
  }

  #escape(code) {
    if (code >= 0x20 && code <= 0x2f) {
      this.#state = ESCAPE_MORE
      if (this.#intermediate.length < 2) this.#intermediate += ASCII[code]
      else this.#intermediate = '??'
      return
    }
    const isFirst = this.#state === ESCAPE
    this.#state = GROUND
    if (code > 0x7e) return
    const final = ASCII[code]
    if (!isFirst) {
      if (this.#intermediate === '(') this.#drawing[0] = final === '0'
      if (this.#intermediate === ')') this.#drawing[1] = final === '0'
      return
    }
    switch (final) {
      case '[':
        this.#state = CSI
        this.#parameters = [-1]
        this.#colons = [false]
        break
      case ']':
      case 'P':
      case 'X':
      case '^':
      case '_':
        this.#state = STRING
        this.#length = 0
        this.#endsByBell = final === ']'
        break
      case '7':
        this.#save()
        break
      case '8':
        this.#restore()
        break
      case 'D':
        this.#index()
        break
      case 'E':
        this.#index()
        this.cursor.x = 0
        break
      case 'H':
        this.#tabs[this.cursor.x] = true
        break
      case 'M':
        this.#reverseIndex()
        break
      case 'c':
        this.#reset()
        break
      case '=':
      case '>':
        this.applicationKeypad = final === '='
        break
      default:
    }
  }

  #csi(code) {
    if (code >= 0x40 && code <= 0x7e) {
      const isIgnored = this.#state === CSI_IGNORED
      this.#state = GROUND
      if (!isIgnored) this.#command(ASCII[code])
      return
    }
    if (code > 0x7e) {
      this.#state = CSI_IGNORED
      return
    }
    if (this.#state === CSI_IGNORED) return
    const last = this.#parameters.length - 1
    if (code >= 0x30 && code <= 0x39 && !this.#intermediate) {
      this.#parameters[last] = Math.min(Math.max(this.#parameters[last], 0) * 10 + code - 0x30, PARAMETER_MAX)
    } else if ((code === 0x3b || code === 0x3a) && !this.#intermediate) {
      if (last + 1 >= PARAMETERS_MAX) this.#state = CSI_IGNORED
      else {
        this.#parameters.push(-1)
        this.#colons.push(code === 0x3a)
      }
    } else if (code >= 0x3c && code <= 0x3f && last === 0 && this.#parameters[0] === -1 && !this.#prefix && !this.#intermediate) {
      this.#prefix = ASCII[code]
    } else if (code >= 0x20 && code <= 0x2f && this.#intermediate.length < 2) {
      this.#intermediate += ASCII[code]
    } else this.#state = CSI_IGNORED
  }

  /** A parameter; absent and zero are the least there is, where a count is meant. */
  #count(at = 0) {
    return Math.max(this.#parameters[at] ?? 1, 1)
  }

  #number(at = 0) {
    return Math.max(this.#parameters[at] ?? 0, 0)
  }

  #command(final) {
    if (this.#prefix || this.#intermediate) {
      const name = this.#prefix + this.#intermediate + final
      if (name === '?h' || name === '?l') for (const mode of this.#parameters) this.#privateMode(mode, final === 'h')
      else if (name === '?J' || name === '?K') this.#erase(final)
      else if (name === '?n' && this.#number() === 6) this.#position('?')
      // A terminal of a kind that has nothing more to tell.
      else if (name === '>c' && this.#number() === 0) this.#reply('\x1b[>0;0;0c')
      else if (name === '!p') this.#softReset()
      return
    }
    const { cursor } = this
    // Moving ends the wait at the right edge; what only looks or asks does not.
    switch (final) {
      case 'A':
        return this.#vertical(-this.#count())
      case 'B':
      case 'e':
        return this.#vertical(this.#count())
      case 'C':
      case 'a':
        return this.#column(cursor.x + this.#count())
      case 'D':
        return this.#column(cursor.x - this.#count())
      case 'E':
        this.#vertical(this.#count())
        return this.#column(0)
      case 'F':
        this.#vertical(-this.#count())
        return this.#column(0)
      case 'G':
      case '`':
        return this.#column(this.#count() - 1)
      case 'H':
      case 'f':
        this.#row(this.#count() - 1)
        return this.#column(this.#count(1) - 1)
      case 'd':
        return this.#row(this.#count() - 1)
      case 'I':
        return this.#tab(this.#count())
      case 'Z':
        return this.#tab(-this.#count())
      case 'J':
      case 'K':
        return this.#erase(final)
      case 'L':
      case 'M':
        return this.#changeLines(final === 'L')
      case '@':
      case 'P':
      case 'X':
        return this.#changeCells(final)
      case 'S':
        return this.#scroll(this.#count())
      case 'T':
        // With more parameters it is about the mouse.
        if (this.#parameters.length === 1) this.#scroll(-this.#count())
        return undefined
      case 'b':
        if (this.#last) for (let left = Math.min(this.#count(), this.columns); left > 0; left -= 1) this.#put(this.#last.text, this.#last.width)
        return undefined
      case 'c':
        if (this.#number() === 0) this.#reply('\x1b[?62;22c')
        return undefined
      case 'n':
        if (this.#number() === 5) this.#reply('\x1b[0n')
        if (this.#number() === 6) this.#position('')
        return undefined
      case 'g':
        if (this.#number() === 0) this.#tabs[cursor.x] = false
        if (this.#number() === 3) this.#tabs.fill(false)
        return undefined
      case 'h':
      case 'l':
        for (const mode of this.#parameters) {
          if (mode === 4) this.#insert = final === 'h'
          if (mode === 20) this.#newline = final === 'h'
        }
        return undefined
      case 'm':
        return this.#rendition()
      case 'r':
        return this.#region()
      case 's':
        return this.#save()
      case 'u':
        return this.#restore()
      default:
        return undefined
    }
  }

  #reply(text) {
    if (this.#replies.length + text.length <= REPLIES_MAX) this.#replies += text
  }

  #position(mark) {
    const y = this.#origin ? this.cursor.y - this.#top : this.cursor.y
    this.#reply(`\x1b[${mark}${y + 1};${this.cursor.x + 1}R`)
  }

  // Modes.

  #privateMode(mode, isSet) {
    switch (mode) {
      case 1:
        this.applicationCursor = isSet
        break
      case 6:
        this.#origin = isSet
        this.#row(0)
        this.#column(0)
        break
      case 7:
        this.#autowrap = isSet
        this.#pendingWrap = false
        break
      case 25:
        this.cursorVisible = isSet
        break
      case 47:
      case 1047:
        this.#alternate(isSet, mode === 1047)
        break
      case 1048:
        if (isSet) this.#save()
        else this.#restore()
        break
      case 1049:
        if (isSet && !this.isAlternate) this.#save()
        if (isSet) this.#alternate(true, true)
        else if (this.isAlternate) {
          this.#alternate(false, true)
          this.#restore()
        }
        break
      case 2004:
        this.bracketedPaste = isSet
        break
      // Others are about the mouse, focus, and how a terminal looks.
      default:
    }
  }

  #alternate(isSet, isCleared) {
    if (isSet !== this.isAlternate) {
      this.isAlternate = isSet
      if (isSet) {
        this.#main = this.#lines
        this.#lines = this.#newLines(this.rows)
      } else {
        this.#lines = this.#main
        this.#main = null
        this.#saved.delete(true)
      }
      this.#pendingWrap = false
    } else if (isSet && isCleared) for (let y = 0; y < this.rows; y += 1) this.#lines[y] = this.#newLine()
  }

  #save() {
    this.#saved.set(this.isAlternate, {
      ...this.cursor,
      style: this.#style,
      origin: this.#origin,
      pendingWrap: this.#pendingWrap,
      drawing: [...this.#drawing],
      shift: this.#shift,
    })
  }

  #restore() {
    const saved = this.#saved.get(this.isAlternate)
    this.cursor.x = clamp(saved?.x ?? 0, 0, this.columns - 1)
    this.cursor.y = clamp(saved?.y ?? 0, 0, this.rows - 1)
    this.#origin = saved?.origin ?? false
    this.#pendingWrap = (saved?.pendingWrap ?? false) && this.cursor.x === this.columns - 1
    this.#drawing = [...(saved?.drawing ?? [false, false])]
    this.#shift = saved?.shift ?? 0
    this.#setStyle(saved?.style ?? PLAIN)
  }

  #softReset() {
    this.cursorVisible = true
    this.applicationCursor = false
    this.applicationKeypad = false
    this.#top = 0
    this.#bottom = this.rows - 1
    this.#origin = false
    this.#autowrap = true
    this.#insert = false
    this.#newline = false
    this.#pendingWrap = false
    this.#drawing = [false, false]
    this.#shift = 0
    this.#saved.clear()
    this.#setStyle(PLAIN)
  }

  /** Everything but the history is as at the beginning. */
  #reset() {
    this.#softReset()
    this.bracketedPaste = false
    this.isAlternate = false
    this.#main = null
    this.#last = null
    this.cursor.x = 0
    this.cursor.y = 0
    // As many as there are columns; `resize` sees to it.
    for (let x = 0; x < Math.max(this.columns, this.#tabs.length); x += 1) this.#tabs[x] = x % 8 === 0
    this.#lines = this.#newLines(this.rows)
  }

  #region() {
    const top = this.#count() - 1
    const bottom = Math.min(this.#number(1) || this.rows, this.rows) - 1
    if (top >= bottom) return
    this.#top = top
    this.#bottom = bottom
    this.#row(0)
    this.#column(0)
  }

  #setStyle(style) {
    this.#style = style
    // Erased cells have the background of now, and nothing else.
    this.#blank = style.bg === DEFAULT ? PLAIN : Object.freeze({ fg: DEFAULT, bg: style.bg, flags: 0 })
  }

  #rendition() {
    let { fg, bg, flags } = this.#style
    const all = this.#parameters
    for (let at = 0; at < all.length; at += 1) {
      const value = Math.max(all[at], 0)
      // Those after a colon belong to the one before.
      let end = at + 1
      while (end < all.length && this.#colons[end]) end += 1
      if (value === 38 || value === 48) {
        const [colour, taken] = this.#colour(at, end)
        if (colour !== null && value === 38) fg = colour
        if (colour !== null && value === 48) bg = colour
        at = taken - 1
        continue
      }
      if (value === 0) [fg, bg, flags] = [DEFAULT, DEFAULT, 0]
      else if (value === 1) flags |= BOLD
      else if (value === 2) flags |= FAINT
      else if (value === 3) flags |= ITALIC
      else if (value === 4) flags = end > at + 1 && all[at + 1] === 0 ? flags & ~UNDERLINE : flags | UNDERLINE
      else if (value === 7) flags |= INVERSE
      else if (value === 8) flags |= HIDDEN
      else if (value === 9) flags |= STRIKE
      else if (value === 21) flags |= UNDERLINE
      else if (value === 22) flags &= ~(BOLD | FAINT)
      else if (value === 23) flags &= ~ITALIC
      else if (value === 24) flags &= ~UNDERLINE
      else if (value === 27) flags &= ~INVERSE
      else if (value === 28) flags &= ~HIDDEN
      else if (value === 29) flags &= ~STRIKE
      else if (value >= 30 && value <= 37) fg = value - 30
      else if (value === 39) fg = DEFAULT
      else if (value >= 40 && value <= 47) bg = value - 40
      else if (value === 49) bg = DEFAULT
      else if (value >= 90 && value <= 97) fg = value - 82
      else if (value >= 100 && value <= 107) bg = value - 92
      // The colour of the underline, which is not drawn, has parameters like those of the text.
      else if (value === 58) end = this.#colour(at, end)[1]
      at = end - 1
    }
    this.#setStyle(Object.freeze({ fg, bg, flags }))
  }

  /** The colour that begins at a parameter, and where the next parameter is. */
  #colour(at, end) {
    const all = this.#parameters
    const isColons = end > at + 1
    const rest = isColons ? all.slice(at + 1, end) : all.slice(at + 1)
    if (rest[0] === 5) {
      const value = Math.max(rest[1] ?? -1, 0)
      return [value <= 255 ? value : null, isColons ? end : at + 3]
    }
    if (rest[0] === 2) {
      // With colons there may be a colour space first.
      const first = isColons && rest.length >= 5 ? 2 : 1
      const parts = [0, 1, 2].map((part) => Math.max(rest[first + part] ?? 0, 0))
      const colour = parts.every((part) => part <= 255) ? TRUE_COLOUR | (parts[0] << 16) | (parts[1] << 8) | parts[2] : null
      return [colour, isColons ? end : at + 5]
    }
    return [null, isColons ? end : at + 2]
  }

  // Cells and lines.

  #newLine() {
    this.#changes += 1
    return new Line(this.#blank, this.#changes)
  }

  #newLines(count) {
    const lines = []
    for (let left = count; left > 0; left -= 1) lines.push(this.#newLine())
    return lines
  }

  #touched(y) {
    const line = this.#lines[y]
    this.#changes += 1
    line.touched = this.#changes
    return line
  }

  #printAscii(byte) {
    const text = this.#drawing[this.#shift] && byte >= 0x60 ? DRAWING[byte - 0x60] : ASCII[byte]
    this.#put(text, 1)
  }

  #printCode(code) {
    if (code < 0x80) return this.#printAscii(code)
    if (code < 0xa0) return undefined
    const width = widthOf(code)
    if (width < 0) return undefined
    let text = String.fromCodePoint(code)
    // A character that ends a line wherever it stands.
    if (SEPARATOR.test(text)) text = '\ufffd'
    if (width === 0) return this.#combine(text)
    this.#put(text, width)
    return undefined
  }

  #combine(mark) {
    const { cursor } = this
    const line = this.#lines[cursor.y]
    let x = this.#pendingWrap ? cursor.x : cursor.x - 1
    if (line.cells[x] === '') x -= 1
    if (x < 0 || line.cells[x] === undefined || line.cells[x].length + mark.length > CELL_MAX) return
    line.cells[x] += mark
    this.#touched(cursor.y)
  }

  #put(text, width) {
    const { cursor, columns } = this
    if (this.#pendingWrap || cursor.x + width > columns) {
      this.#pendingWrap = false
      if (this.#autowrap) {
        this.#touched(cursor.y).wrapped = true
        cursor.x = 0
        this.#index()
      } else cursor.x = columns - width
    }
    const line = this.#touched(cursor.y)
    if (this.#insert) line.insert(cursor.x, width, columns, this.#blank)
    const { x } = cursor
    line.split(x)
    line.split(x + width)
    line.extend(x + width)
    line.cells[x] = text
    line.styles[x] = this.#style
    if (width === 2) {
      line.cells[x + 1] = ''
      line.styles[x + 1] = this.#style
    }
    this.#last = { text, width }
    cursor.x += width
    if (cursor.x >= columns) {
      cursor.x = columns - 1
      this.#pendingWrap = this.#autowrap
    }
  }

  #column(x) {
    this.#pendingWrap = false
    this.cursor.x = clamp(x, 0, this.columns - 1)
  }

  #row(y) {
    this.#pendingWrap = false
    this.cursor.y = this.#origin ? clamp(y + this.#top, this.#top, this.#bottom) : clamp(y, 0, this.rows - 1)
  }

  /** Moves up or down, and never across an edge of the region. */
  #vertical(count) {
    const { y } = this.cursor
    this.#pendingWrap = false
    const least = y >= this.#top ? this.#top : 0
    const most = y <= this.#bottom ? this.#bottom : this.rows - 1
    this.cursor.y = clamp(y + count, least, most)
  }

  #tab(count) {
    // Forward from the right edge there is nowhere to go, and a character that waits for the next line still does.
    if (count > 0 && this.#pendingWrap) return
    this.#pendingWrap = false
    const step = count > 0 ? 1 : -1
    let { x } = this.cursor
    for (let left = Math.min(Math.abs(count), this.columns); left > 0; left -= 1) {
      if ((step > 0 && x >= this.columns - 1) || (step < 0 && x <= 0)) break
      do x += step
      while (x > 0 && x < this.columns - 1 && !this.#tabs[x])
    }
    this.cursor.x = clamp(x, 0, this.columns - 1)
  }

  #index() {
    this.#pendingWrap = false
    if (this.cursor.y === this.#bottom) this.#scroll(1)
    else if (this.cursor.y < this.rows - 1) this.cursor.y += 1
  }

  #reverseIndex() {
    this.#pendingWrap = false
    if (this.cursor.y === this.#top) this.#scroll(-1)
    else if (this.cursor.y > 0) this.cursor.y -= 1
  }

  /** Scrolls the region. Lines that leave the main screen at its top are kept; those that a program deletes are not. */
  #scroll(count) {
    this.#pendingWrap = false
    const gone = this.#move(this.#top, count)
    if (count > 0 && this.#top === 0 && !this.isAlternate) this.#keep(gone)
  }

  /** Moves the lines from `top` to the end of the region up, or down with a negative count; returns those that left it. */
  #move(top, count) {
    const size = this.#bottom - top + 1
    const moved = Math.min(Math.abs(count), size)
    const fresh = this.#newLines(moved)
    if (count > 0) {
      const gone = this.#lines.splice(top, moved)
      this.#lines.splice(this.#bottom - moved + 1, 0, ...fresh)
      return gone
    }
    const gone = this.#lines.splice(this.#bottom - moved + 1, moved)
    this.#lines.splice(top, 0, ...fresh)
    return gone
  }

  #keep(lines) {
    for (const line of lines) {
      line.cut(this.columns)
      this.#history.push(line)
    }
    this.scrolled += lines.length
    if (this.#history.length >= HISTORY + HISTORY_SLACK) this.#history.splice(0, this.#history.length - HISTORY)
  }

  #erase(final) {
    const { x, y } = this.cursor
    const how = this.#number()
    this.#pendingWrap = false
    if (final === 'J' && how === 3) {
      this.#history = []
      return
    }
    if (how > 2) return
    const line = this.#touched(y)
    line.erase(how === 0 ? x : 0, how === 1 ? x + 1 : this.columns, this.columns, this.#blank)
    if (final === 'K') return
    for (let other = 0; other < this.rows; other += 1) {
      if ((other > y && how !== 1) || (other < y && how !== 0)) this.#lines[other] = this.#newLine()
    }
  }

  #changeLines(isInserted) {
    const { y } = this.cursor
    this.#pendingWrap = false
    if (y < this.#top || y > this.#bottom) return
    const count = this.#count()
    this.#move(y, isInserted ? -count : count)
    this.cursor.x = 0
  }

  #changeCells(final) {
    const { x, y } = this.cursor
    const count = Math.min(this.#count(), this.columns - x)
    this.#pendingWrap = false
    const line = this.#touched(y)
    if (final === '@') line.insert(x, count, this.columns, this.#blank)
    else if (final === 'P') line.delete(x, count, this.columns, this.#blank)
    else line.erase(x, x + count, this.columns, this.#blank)
  }

  /** Another size. Lines stay as they are: what no longer fits is drawn again when there is room. */
  resize(columns, rows) {
    columns = clamp(Math.trunc(columns) || this.columns, 2, COLUMNS_MAX)
    rows = clamp(Math.trunc(rows) || this.rows, 1, ROWS_MAX)
    const main = this.isAlternate ? this.#main : this.#lines
    const cursor = this.isAlternate ? (this.#saved.get(false) ?? { x: 0, y: 0 }) : this.cursor
    // Blank lines below the cursor go first, then those at the top.
    while (main.length > rows && main.length - 1 > cursor.y && main.at(-1).cells.length === 0) main.pop()
    if (main.length > rows) {
      const gone = main.splice(0, main.length - rows)
      cursor.y = Math.max(cursor.y - gone.length, 0)
      this.columns = Math.max(columns, this.columns)
      this.#keep(gone)
    }
    while (main.length < rows && this.historyLength > 0) {
      main.unshift(this.#history.pop())
      cursor.y += 1
      this.scrolled -= 1
    }
    while (main.length < rows) main.push(this.#newLine())
    if (this.isAlternate) {
      this.#lines.length = Math.min(this.#lines.length, rows)
      while (this.#lines.length < rows) this.#lines.push(this.#newLine())
    }
    for (let x = this.#tabs.length; x < columns; x += 1) this.#tabs.push(x % 8 === 0)
    this.columns = columns
    this.rows = rows
    this.#top = 0
    this.#bottom = rows - 1
    this.#pendingWrap = false
    this.cursor.x = clamp(this.cursor.x, 0, columns - 1)
    this.cursor.y = clamp(this.cursor.y, 0, rows - 1)
  }
}

// The modules under test, and small helpers of their tests. They run in Node, without a page.

export const ASSETS = new URL('../../../crates/server/src/dashboard/assets/', import.meta.url)

/** A module of the dashboard. */
export function asset(name) {
  return import(new URL(name, ASSETS))
}

/** Numbers from 0 up to a bound, the same in every run. */
export function numbers(seed) {
  let state = seed >>> 0
  return (bound) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0
    return Math.floor((state / 2 ** 32) * bound)
  }
}

export const bytesOf = (text) => new TextEncoder().encode(text)

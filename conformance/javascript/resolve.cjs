// Loaded before a program: names below `localhost` lead to the loopback, as RFC 6761 has it and plain resolvers do not.

const dns = require('node:dns')

const { lookup } = dns

dns.lookup = function (name, options, done) {
  return lookup.call(this, name.endsWith('.localhost') ? '127.0.0.1' : name, options, done)
}

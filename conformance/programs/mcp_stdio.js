#!/usr/bin/env node
/* A small MCP server on standard input and output, without libraries: what `npx` starts in the tests, as a package of npm. */

const readline = require("node:readline");

const ANSWERS = {
  initialize: () => ({
    protocolVersion: "2025-06-18",
    capabilities: { tools: {} },
    serverInfo: { name: "of-npm", version: "1.0" },
  }),
  ping: () => ({}),
  "tools/list": () => ({ tools: [{ name: "of_npm", inputSchema: { type: "object" } }] }),
  "tools/call": (given) => ({ content: [{ type: "text", text: `node ${given.arguments.word} ${process.getuid()}` }] }),
};

readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const { id, method, params } = JSON.parse(line);
  if (id === undefined) return;
  const answer = ANSWERS[method];
  const said = answer ? { result: answer(params) } : { error: { code: -32601, message: `there is no ${method}` } };
  console.log(JSON.stringify({ jsonrpc: "2.0", id, ...said }));
});

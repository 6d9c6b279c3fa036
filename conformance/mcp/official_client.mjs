// A program that uses the official TypeScript client of the Model Context Protocol: connects, lists and calls every tool,
// and prints what it got as JSON.
//
// Usage: official_client.mjs URL VERSION   where VERSION is the protocol version that the client offers, or `default`

import { readFileSync } from "node:fs";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { McpError } from "@modelcontextprotocol/sdk/types.js";

const [url, version] = process.argv.slice(2);
const calls = JSON.parse(readFileSync(0, "utf8"));

const transport = new StreamableHTTPClientTransport(new URL(url));
let protocolVersion;
if (version !== "default") {
  const send = transport.send.bind(transport);
  transport.send = (message, options) => {
    const offered = { ...message, params: { ...message.params, protocolVersion: version } };
    return send(message.method === "initialize" ? offered : message, options);
  };
}
const setProtocolVersion = transport.setProtocolVersion.bind(transport);
transport.setProtocolVersion = (negotiated) => {
  protocolVersion = negotiated;
  setProtocolVersion(negotiated);
};

const client = new Client({ name: "conformance", version: "1.0.0" });
await client.connect(transport);
await client.ping();
const report = {
  initialized: { protocolVersion, serverInfo: client.getServerVersion() },
  tools: (await client.listTools()).tools,
  results: [],
  errors: [],
};
for (const [name, args] of calls) {
  report.results.push(await client.callTool({ name, arguments: args }));
}
for (const [name, args] of [["no_such_tool", {}], [calls[0][0], {}]]) {
  try {
    await client.callTool({ name, arguments: args });
  } catch (error) {
    if (!(error instanceof McpError)) throw error;
    report.errors.push(error.code);
  }
}
await client.close();
process.stdout.write(JSON.stringify(report));

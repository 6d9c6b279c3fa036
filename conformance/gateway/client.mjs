/* A program with the JavaScript SDK: it creates a sandbox with the servers of its argument, which stays, and prints what it knows of it. */

import { Sandbox } from "e2b";

const refused = await Sandbox.create({ mcp: { exa: { apiKey: "x" } }, timeoutMs: 60_000 }).catch((error) => error.message);
const box = await Sandbox.create({ mcp: JSON.parse(process.argv[2]), timeoutMs: 120_000 });
const again = await Sandbox.connect(box.sandboxId);
const tokens = [await box.getMcpToken(), await again.getMcpToken()];
console.log(JSON.stringify({ id: box.sandboxId, url: box.getMcpUrl(), tokens, refused }));

/* Runs cells of JavaScript and TypeScript in this process: one line of JSON per request, one line per answer.
 *
 * Cells are evaluated as the console of a debugger does it, which allows names to be declared again, `await` outside of
 * functions, and gives the value of the last expression. Imports, which are not allowed there, become calls before.
 *
 * Usage: node.js REQUESTS ANSWERS MODULES, two descriptors and the directory of the packages that this needs.
 */

"use strict";

const fs = require("node:fs");
const inspector = require("node:inspector");
const { createRequire } = require("node:module");
const path = require("node:path");
const readline = require("node:readline");
const { pathToFileURL } = require("node:url");
const util = require("node:util");

const [requests, answers] = [Number(process.argv[2]), Number(process.argv[3])];
const ours = createRequire(path.join(process.argv[4], "package.json"));
const { transform } = ours("sucrase");
const lexer = ours("es-module-lexer");
const session = new inspector.Session();

// What cells find beside the globals of Node.
const theirs = createRequire(path.join(process.cwd(), "cell.js"));
globalThis.require = theirs;
globalThis.__ringfence_import = async (name) => {
  const found = String(name);
  if (/^(node:|file:|data:)/.test(found)) return import(found);
  const place = theirs.resolve(found);
  return import(path.isAbsolute(place) ? pathToFileURL(place).href : place);
};

let interrupt = () => {};
process.on("SIGINT", () => interrupt());
process.on("uncaughtException", (error) => process.stderr.write(`Uncaught ${util.inspect(error)}\n`));
process.on("unhandledRejection", (error) => process.stderr.write(`Unhandled rejection: ${util.inspect(error)}\n`));
// A cell that ends this process would wait for ever: Node waits for reads that have begun, and that of the next request has.
process.on("exit", () => process.kill(process.pid, "SIGKILL"));

/** The names of an import as a pattern of an assignment. */
function pattern(clause) {
  const parts = [];
  let whole = "";
  const named = clause.match(/\{([^}]*)\}/);
  const rest = clause.replace(/\{[^}]*\}/, "");
  for (const part of rest.split(",").map((text) => text.trim()).filter(Boolean)) {
    const all = part.match(/^\*\s*as\s+(\S+)$/);
    if (all) whole = all[1];
    else parts.push(`default: ${part}`);
  }
  for (const part of (named ? named[1] : "").split(",").map((text) => text.trim()).filter(Boolean)) {
    parts.push(part.replace(/^(\S+)\s+as\s+(\S+)$/, "$1: $2"));
  }
  return { whole, names: parts.length ? `{ ${parts.join(", ")} }` : "" };
}

/** A cell without imports: those that stand alone become assignments of what is loaded. */
function withoutImports(code) {
  let found;
  try {
    [found] = lexer.parse(code);
  } catch {
    // What is wrong is said by the evaluation, in better words.
    return code;
  }
  let text = "";
  let at = 0;
  for (const one of found) {
    if (one.type === "static") {
      text += code.slice(at, one.importStart);
      const clause = code.slice(one.importStart + "import".length, one.start).match(/^([\s\S]*?)\bfrom\s*['"]$/);
      const { whole, names } = clause ? pattern(clause[1]) : { whole: "", names: "" };
      const loaded = `await __ringfence_import(${JSON.stringify(one.specifier)})`;
      if (whole) text += `const ${whole} = ${loaded};${names ? ` const ${names} = ${whole};` : ""}`;
      else text += names ? `const ${names} = ${loaded};` : `${loaded};`;
      at = one.importEnd;
    } else if (one.type === "dynamic") {
      text += `${code.slice(at, one.importStart)}__ringfence_import`;
      at = one.dynamicStart;
    }
  }
  return text + code.slice(at);
}

function post(method, options) {
  return new Promise((resolve, reject) => {
    session.post(method, options, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

/** What a cell gave, by MIME type. */
function formats(value) {
  if (value === undefined) return undefined;
  if (typeof value === "string") return { "text/plain": value };
  const data = { "text/plain": util.inspect(value) };
  if (Array.isArray(value) || (value && Object.getPrototypeOf(value) === Object.prototype)) {
    try {
      data["application/json"] = JSON.parse(JSON.stringify(value));
    } catch {
      // Circles and big integers have no JSON.
    }
  }
  return data;
}

function failure(value) {
  if (value instanceof Error || (value && typeof value.stack === "string")) {
    return { name: String(value.name), value: String(value.message), traceback: String(value.stack) };
  }
  return { name: "Error", value: typeof value === "string" ? value : util.inspect(value), traceback: "" };
}

/** The object behind what the debugger says, which can only name it. */
async function object(remote) {
  if (remote.objectId) {
    await post("Runtime.callFunctionOn", {
      objectId: remote.objectId,
      functionDeclaration: "function () { globalThis.__ringfence_value = this; }",
    });
    const value = globalThis.__ringfence_value;
    delete globalThis.__ringfence_value;
    return value;
  }
  if (remote.unserializableValue) {
    const text = remote.unserializableValue;
    return text.endsWith("n") ? BigInt(text.slice(0, -1)) : Number(text);
  }
  return remote.value;
}

async function evaluate(code, typed) {
  const plain = typed
    ? transform(code, { transforms: ["typescript"], disableESTransforms: true, keepUnusedImports: true }).code
    : code;
  const answer = await post("Runtime.evaluate", {
    expression: withoutImports(plain),
    replMode: true,
    awaitPromise: true,
    allowUnsafeEvalBlockedByCSP: true,
  });
  if (answer.exceptionDetails) {
    const { exception, text } = answer.exceptionDetails;
    return { error: failure(exception ? await object(exception) : text) };
  }
  let value = await object(answer.result);
  if (util.types.isPromise(value)) value = await value;
  return { data: formats(value) };
}

const ofSandbox = new Map();

async function run({ code, typed, sandbox, call }) {
  for (const [name, value] of Object.entries(sandbox)) {
    if (ofSandbox.get(name) !== value) process.env[name] = value;
    ofSandbox.set(name, value);
  }
  const before = Object.keys(call).map((name) => [name, process.env[name]]);
  Object.assign(process.env, call);
  const interrupted = new Promise((resolve) => {
    interrupt = () => resolve({ error: { name: "KeyboardInterrupt", value: "", traceback: "" } });
  });
  try {
    return await Promise.race([evaluate(code, typed).catch((error) => ({ error: failure(error) })), interrupted]);
  } finally {
    interrupt = () => {};
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
  }
}

async function main() {
  await lexer.init;
  session.connect();
  const say = (answer) => {
    const data = Buffer.from(`${JSON.stringify(answer)}\n`);
    for (let at = 0; at < data.length; ) at += fs.writeSync(answers, data, at);
  };
  say({});
  for await (const line of readline.createInterface({ input: fs.createReadStream(null, { fd: requests }) })) {
    say(await run(JSON.parse(line)));
  }
}

main();

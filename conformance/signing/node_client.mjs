// The signatures of Qiniu's Node SDK, with and without a date, on operations of injection rules. Prints `ok` at the end.
import { createRequire } from "node:module";

const qiniu = createRequire(import.meta.url)("qiniu");
const address = process.env.E2B_API_URL;

async function call(method, path, body, { date, secret = process.env.RINGFENCE_SECRET_KEY } = {}) {
  const mac = new qiniu.auth.digest.Mac(process.env.RINGFENCE_ACCESS_KEY, secret);
  const url = new URL(path, address);
  const headers = date ? { "X-Qiniu-Date": new Date().toISOString().replace(/[-:]|\.\d+/g, "") } : {};
  // It signs the port twice, and without a body the type of a form, which is not sent.
  const type = body === undefined ? undefined : "application/json";
  const token = qiniu.util.generateAccessTokenV2(mac, url.href, method, type, body, headers);
  if (type) headers["Content-Type"] = type;
  return fetch(url, { method, body, headers: { ...headers, Authorization: token } });
}

function same(got, want, what) {
  if (got !== want) throw new Error(`${what}: got ${got}, want ${want}`);
}

const rule = JSON.stringify({ name: "from node", injection: { type: "openai", api_key: "sk-from-a-node-client" } });
for (const options of [{}, { date: true }]) {
  const made = await call("POST", "/injection-rules", rule, options);
  same(made.status, 201, `create ${JSON.stringify(options)}`);
  const { ruleID, injection } = await made.json();
  same(injection.api_key, "sk-f****", "the masked key");
  same((await call("GET", `/injection-rules/${ruleID}`, undefined, options)).status, 200, "get");
  const renamed = await call("PUT", `/injection-rules/${ruleID}`, JSON.stringify({ name: "renamed" }), options);
  same((await renamed.json()).name, "renamed", "the name");
  same((await call("DELETE", `/injection-rules/${ruleID}`, undefined, options)).status, 204, "delete");
  same((await call("GET", "/injection-rules", undefined, { ...options, secret: "another" })).status, 401, "a wrong signature");
}
console.log("ok");

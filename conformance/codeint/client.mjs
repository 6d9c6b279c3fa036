/* A program with the JavaScript client: it calls every method and prints what came of it as JSON.

   Its argument is an object with a cell for each format of results, as JSON. */

import { NotFoundError, Sandbox, TimeoutError } from "@e2b/code-interpreter";

const PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()";
const found = {};
const box = await Sandbox.create({ timeoutMs: 120_000 });
try {
  const first = await box.runCode("import sys\nprint('hello')\nprint('bad', file=sys.stderr)\n1 + 1");
  const failed = (await box.runCode("raise ValueError('no')")).error;
  Object.assign(found, { text: first.text, stdout: first.logs.stdout, stderr: first.logs.stderr });
  found.error = [failed.name, failed.value];
  found.bash = (await box.runCode("echo $V", { language: "bash", envs: { V: "of the call" } })).logs.stdout;
  found.js = (await box.runCode("1 + 2", { language: "js" })).text;
  const context = await box.createCodeContext({ cwd: "/tmp" });
  found.cwd = (await box.runCode("import os; kept = 1; os.getcwd()", { context })).text;
  found.languages = (await box.listCodeContexts()).map((each) => each.language);
  await box.restartCodeContext(context);
  found.restarted = (await box.runCode("'kept' in dir()", { context })).text;
  await box.removeCodeContext(context);
  try {
    await box.removeCodeContext(context);
  } catch (error) {
    if (error instanceof NotFoundError) found.missing = "NotFound";
  }
  const cells = JSON.parse(process.argv[2]);
  found.formats = {};
  for (const [name, cell] of Object.entries(cells)) {
    const result = (await box.runCode(cell)).results[0];
    const given = Object.keys(cells).filter((each) => result[each] !== undefined);
    found.formats[name] = Object.fromEntries(given.map((each) => [each, result[each]]));
  }
  const plot = (await box.runCode(PLOT)).results[0];
  found.png = plot.png.startsWith("iVBOR");
  found.chart = plot.chart.type;
  found.data = (await box.runCode("import pandas as pd; pd.DataFrame({'a': [1, 2]})")).results[0].data;
  found.json = (await box.runCode("{'k': [1]}")).results[0].json;
  found.html = (await box.runCode("from IPython.display import HTML; HTML('<b>x</b>')")).results[0].html;
  try {
    await box.runCode("while True: pass", { timeoutMs: 1000 });
  } catch (error) {
    if (error instanceof TimeoutError) found.timeout = "Timeout";
  }
  found.after = (await box.runCode("'alive'")).text;
  const said = [];
  await box.runCode("print('a'); display(7); missing", {
    onStdout: (message) => said.push(message.line),
    onResult: (result) => said.push(result.text),
    onError: (error) => said.push(error.name),
  });
  found.callbacks = said;
} finally {
  await box.kill();
}
console.log(JSON.stringify(found));

"""A program with the asynchronous client of Python: it calls every method and prints what came of it as JSON.

Its argument is an object with a cell for each format of results, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import AsyncSandbox

PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"


async def use(box: AsyncSandbox) -> dict[str, object]:
    first = await box.run_code("import sys\nprint('hello')\nprint('bad', file=sys.stderr)\n1 + 1")
    failed = (await box.run_code("raise ValueError('no')")).error
    found: dict[str, object] = {"text": first.text, "stdout": first.logs.stdout, "stderr": first.logs.stderr}
    found["error"] = [failed.name, failed.value]
    found["bash"] = (await box.run_code("echo $V", language="bash", envs={"V": "of the call"})).logs.stdout
    found["js"] = (await box.run_code("1 + 2", language="js")).text
    context = await box.create_code_context(cwd="/tmp")
    found["cwd"] = (await box.run_code("import os; kept = 1; os.getcwd()", context=context)).text
    found["languages"] = [each.language for each in await box.list_code_contexts()]
    # Contexts run side by side.
    both = await asyncio.gather(box.run_code("'one'"), box.run_code("'two'", context=context))
    found["beside"] = [each.text for each in both]
    await box.restart_code_context(context)
    found["restarted"] = (await box.run_code("'kept' in dir()", context=context)).text
    await box.remove_code_context(context)
    try:
        await box.remove_code_context(context)
    except NotFoundException:
        found["missing"] = "NotFound"
    cells: dict[str, str] = json.loads(sys.argv[1])
    results = {name: (await box.run_code(cell)).results[0] for name, cell in cells.items()}
    found["formats"] = {name: {each: result[each] for each in cells if result[each] is not None} for name, result in results.items()}
    plot = (await box.run_code(PLOT)).results[0]
    found["png"] = plot.png.startswith("iVBOR")
    found["chart"] = plot.chart.type.value
    found["data"] = (await box.run_code("import pandas as pd; pd.DataFrame({'a': [1, 2]})")).results[0].data
    found["json"] = (await box.run_code("{'k': [1]}")).results[0].json
    found["html"] = (await box.run_code("from IPython.display import HTML; HTML('<b>x</b>')")).results[0].html
    try:
        await box.run_code("while True: pass", timeout=1, request_timeout=1)
    except TimeoutException:
        found["timeout"] = "Timeout"
    found["after"] = (await box.run_code("'alive'")).text
    said: list[str] = []

    async def line(message: object) -> None:
        said.append(message.line)  # type: ignore[attr-defined]

    async def result(one: object) -> None:
        said.append(one.text)  # type: ignore[attr-defined]

    async def error(one: object) -> None:
        said.append(one.name)  # type: ignore[attr-defined]

    await box.run_code("print('a'); display(7); missing", on_stdout=line, on_result=result, on_error=error)
    found["callbacks"] = said
    return found


async def main() -> None:
    box = await AsyncSandbox.create(timeout=120)
    try:
        print(json.dumps(await use(box)))
    finally:
        await box.kill()


asyncio.run(main())
# Threads of the older HTTP library outlive the interpreter now and then, which ends by a signal then.
sys.stdout.flush()
os._exit(0)

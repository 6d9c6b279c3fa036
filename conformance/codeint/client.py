"""A program with an older client of Python: it calls every method and prints what came of it as JSON.

Its argument is an object with a cell for each format of results, as JSON.
"""

from __future__ import annotations

import json
import sys
import time

from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import Sandbox

PLOT = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()"


def main() -> None:
    box = Sandbox.create(timeout=120)
    try:
        first = box.run_code("import sys\nprint('hello')\nprint('bad', file=sys.stderr)\n1 + 1")
        failed = box.run_code("raise ValueError('no')").error
        found = {"text": first.text, "stdout": first.logs.stdout, "stderr": first.logs.stderr}
        found["error"] = [failed.name, failed.value]
        found["bash"] = box.run_code("echo $V", language="bash", envs={"V": "of the call"}).logs.stdout
        found["js"] = box.run_code("1 + 2", language="js").text
        context = box.create_code_context(cwd="/tmp")
        found["cwd"] = box.run_code("import os; kept = 1; os.getcwd()", context=context).text
        found["languages"] = [each.language for each in box.list_code_contexts()]
        box.restart_code_context(context)
        found["restarted"] = box.run_code("'kept' in dir()", context=context).text
        box.remove_code_context(context)
        try:
            box.remove_code_context(context)
        except NotFoundException:
            found["missing"] = "NotFound"
        cells: dict[str, str] = json.loads(sys.argv[1])
        results = {name: box.run_code(cell).results[0] for name, cell in cells.items()}
        found["formats"] = {name: {each: result[each] for each in cells if result[each] is not None} for name, result in results.items()}
        plot = box.run_code(PLOT).results[0]
        found["png"] = plot.png.startswith("iVBOR")
        found["chart"] = plot.chart.type.value
        found["data"] = box.run_code("import pandas as pd; pd.DataFrame({'a': [1, 2]})").results[0].data
        found["json"] = box.run_code("{'k': [1]}").results[0].json
        found["html"] = box.run_code("from IPython.display import HTML; HTML('<b>x</b>')").results[0].html
        begun = time.monotonic()
        try:
            box.run_code("while True: pass", timeout=1, request_timeout=1)
        except TimeoutException:
            found["timeout"] = "Timeout"
        # This client gives up after the sum of both.
        found["patience"] = round(time.monotonic() - begun, 1)
        found["after"] = box.run_code("'alive'").text
        said: list[str] = []
        box.run_code(
            "print('a'); display(7); missing",
            on_stdout=lambda message: said.append(message.line),
            on_result=lambda result: said.append(result.text),
            on_error=lambda error: said.append(error.name),
        )
        found["callbacks"] = said
    finally:
        box.kill()
    print(json.dumps(found))


main()

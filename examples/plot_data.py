"""Cells of a code interpreter that read a file and plot it. Variables stay between cells, and a plot arrives as a picture and as data.

    python plot_data.py PLOT.png
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from e2b_code_interpreter import Sandbox

TABLE = "month,rain\nJanuary,52\nFebruary,41\nMarch,48\n"
PLOT = """
import matplotlib.pyplot as plt
plt.bar(table.month, table.rain)
plt.ylabel("rain in mm")
plt.show()
"""


def main() -> None:
    with Sandbox.create(timeout=120) as box:
        box.files.write("/home/user/rain.csv", TABLE)
        read = box.run_code("import pandas as pd\ntable = pd.read_csv('/home/user/rain.csv')\nfloat(table.rain.mean())")
        print(f"mean: {read.text}")
        plot = box.run_code(PLOT).results[0]
        Path(sys.argv[1]).write_bytes(base64.b64decode(plot.png))
        print(", ".join(f"{bar.label} {bar.value:.0f}" for bar in plot.chart.elements))


if __name__ == "__main__":
    main()

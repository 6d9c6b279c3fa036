"""Results: every format that the client knows, tables as data and figures as charts."""

from __future__ import annotations

import base64
import struct

import pytest
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import ChartType

PNG = b"\x89PNG\r\n\x1a\n"

RAW = {
    "text": ("text/plain", "plain"),
    "html": ("text/html", "<b>x</b>"),
    "markdown": ("text/markdown", "# x"),
    "svg": ("image/svg+xml", "<svg/>"),
    "png": ("image/png", "iVBORw0K"),
    "jpeg": ("image/jpeg", "/9j/"),
    "pdf": ("application/pdf", "JVBERi0="),
    "latex": ("text/latex", "$x$"),
    "json": ("application/json", {"a": [1, None]}),
    "javascript": ("application/javascript", "1 + 1"),
    "data": ("e2b/data", {"a": [1]}),
}


@pytest.mark.parametrize("field", RAW)
def test_each_format_arrives_alone(shared: Sandbox, field: str) -> None:
    mime, value = RAW[field]
    (result,) = shared.run_code(f"display({{{mime!r}: {value!r}}}, raw=True)").results
    assert list(result.formats()) == [field]
    assert getattr(result, field) == value
    assert not result.is_main_result and not result.extra


def test_other_formats_are_extra(shared: Sandbox) -> None:
    (result,) = shared.run_code("display({'application/x-mine': 'm', 'text/plain': 't'}, raw=True)").results
    assert (result.text, result.extra) == ("t", {"application/x-mine": "m"})


def test_objects_of_ipython(shared: Sandbox) -> None:
    done = shared.run_code(
        "from IPython.display import HTML, Markdown, SVG, Latex, Javascript, JSON\n"
        "for each in (HTML('<i>'), Markdown('*'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\"/>'), Latex('$y$'), Javascript('2'), JSON({'b': 1})):\n"
        "    display(each)\n'end'"
    )
    fields = ("html", "markdown", "svg", "latex", "javascript", "json")
    assert [bool(getattr(result, field)) for result, field in zip(done.results, fields, strict=False)] == [True] * 6
    assert (len(done.results), done.text) == (7, "end")


def test_lists_and_dictionaries_have_json(shared: Sandbox) -> None:
    done = shared.run_code("import numpy as np\n{'a': [1, np.int64(2)], 3: float('nan'), 'd': (np.float64(0.5),)}")
    assert done.results[0].json == {"a": [1, 2], "3": None, "d": [0.5]}
    assert shared.run_code("[object()]").results[0].json is None


def test_a_table_is_data(shared: Sandbox) -> None:
    done = shared.run_code(
        "import pandas as pd\n"
        "pd.DataFrame({'n': [1.5, None], 's': ['x', None], 't': pd.to_datetime(['2026-01-02', None]), 'c': pd.Categorical(['u', 'v'])})"
    )
    result = done.results[0]
    assert result.data == {"n": [1.5, None], "s": ["x", None], "t": ["2026-01-02T00:00:00", None], "c": ["u", "v"]}
    assert "<table" in result.html and "1.5" in result.text


def test_a_plot_is_a_picture_and_a_chart(shared: Sandbox) -> None:
    results: list[object] = []
    done = shared.run_code(
        "import matplotlib.pyplot as plt\n"
        "plt.plot([1, 2, 3], [4, 5, 6], label='up')\nplt.title('T'); plt.xlabel('time (s)'); plt.ylabel('size [m]')\nplt.show()\n'after'",
        on_result=results.append,
    )
    assert len(results) == len(done.results) == 2 and done.text == "after"
    plot = done.results[0]
    picture = base64.b64decode(plot.png, validate=True)
    assert picture.startswith(PNG)
    assert min(struct.unpack(">II", picture[16:24])) > 100
    chart = plot.chart
    assert (chart.type, chart.title, chart.x_label, chart.x_unit, chart.y_unit) == (ChartType.LINE, "T", "time (s)", "s", "m")
    assert [(line.label, [tuple(point) for point in line.points]) for line in chart.elements] == [("up", [(1, 4), (2, 5), (3, 6)])]


CHARTS = {
    "bar": ("plt.bar(['a', 'b'], [1, 2])", [("a", 1), ("b", 2)]),
    "pie": ("plt.pie([9, 1], labels=['a', 'b'])", [("a", 324), ("b", 36)]),
    "scatter": ("plt.scatter([1, 2], [3, 4], label='s')", [("s", 2)]),
    "box_and_whisker": ("plt.boxplot([[1, 2, 3, 4, 5], [2, 4, 6, 8, 10]], labels=['a', 'b'], patch_artist=True)", [("a", 3), ("b", 6)]),
}


@pytest.mark.parametrize("kind", CHARTS)
def test_kinds_of_charts(shared: Sandbox, kind: str) -> None:
    code, want = CHARTS[kind]
    done = shared.run_code(f"import matplotlib.pyplot as plt\n{code}\nplt.show()")
    chart = done.results[0].chart
    assert chart is not None, done
    value = {
        "bar": lambda each: float(each.value),
        "pie": lambda each: each.angle,
        "scatter": lambda each: len(each.points),
        "box_and_whisker": lambda each: each.median,
    }[kind]
    assert (chart.type.value, [(each.label, value(each)) for each in chart.elements]) == (kind, want)


def test_several_axes_are_one_chart(shared: Sandbox) -> None:
    code = "import matplotlib.pyplot as plt\nf, (a, b) = plt.subplots(1, 2); f.suptitle('both'); a.plot([1, 2]); b.bar(['x'], [1]); plt.show()"
    chart = shared.run_code(code).results[0].chart
    assert (chart.type, chart.title, [each.type.value for each in chart.elements]) == (ChartType.SUPERCHART, "both", ["line", "bar"])


def test_pictures_of_pillow(shared: Sandbox) -> None:
    done = shared.run_code("from PIL import Image\ni = Image.new('RGB', (3, 3)); i.save('/tmp/i.png'); i.show()")
    assert [base64.b64decode(result.png).startswith(PNG) for result in done.results] == [True, True]

"""Formats of results beyond those of IPython: JSON of lists and dictionaries, data frames as data, figures as charts.

Formatters for types of other packages are registered by name, so that no package is imported before a cell does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from IPython.core.formatters import BaseFormatter
from IPython.core.interactiveshell import InteractiveShell
from traitlets import ObjectName, Unicode

# Rows of a data frame and characters of JSON up to which they are sent as data beside their text.
ROWS, CHARACTERS = 100_000, 16 << 20


class DataFormatter(BaseFormatter):
    """Tables as columns."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)


class ChartFormatter(BaseFormatter):
    """Figures as what they show."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def pop(self, typ: Any, default: Any = None) -> Any:
        """Keeps what is registered: the backend of matplotlib removes figures from all formatters but its own."""
        return default


def register(shell: InteractiveShell) -> None:
    """Prepares a shell."""
    shell.run_line_magic("colors", "nocolor")
    formatter = shell.display_formatter
    for kind in (DataFormatter, ChartFormatter):
        made = kind(parent=formatter)
        formatter.formatters[made.format_type] = made
    formatter.active_types = formatter.format_types
    formatter.formatters["text/plain"].max_seq_length = 0
    of_json = formatter.formatters["application/json"]
    for kind in (list, dict, tuple):
        of_json.for_type(kind, as_json)
    formatter.formatters["e2b/data"].for_type_by_name("pandas.core.frame", "DataFrame", as_data)
    formatter.formatters["e2b/data"].for_type_by_name("pandas", "DataFrame", as_data)
    formatter.formatters["e2b/chart"].for_type_by_name("matplotlib.figure", "Figure", as_chart)
    formatter.formatters["image/png"].for_type_by_name("PIL.Image", "Image", as_png)
    sys.meta_path.insert(0, Watch())


def plain(value: Any) -> Any:
    """A value of NumPy or another package as one of JSON."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    for name in ("item", "tolist"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"no JSON for {type(value).__name__}")


def keyed(value: Any) -> Any:
    """A copy with texts for keys, and null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): keyed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [keyed(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return keyed(plain(value))


def as_json(value: Any) -> Any:
    """A list or a dictionary, or nothing where its content has no JSON."""
    try:
        found = keyed(value)
        if isinstance(found, list | dict) and len(json.dumps(found)) <= CHARACTERS:
            return found
    except (TypeError, ValueError, RecursionError):
        pass
    return None


def as_data(frame: Any) -> dict[str, list[Any]] | None:
    """A data frame as a list of values for each column."""
    if len(frame) > ROWS:
        return None
    columns: dict[str, list[Any]] = {}
    for position, name in enumerate(frame.columns):
        columns[str(name)] = [cell(value) for value in frame.iloc[:, position].tolist()]
    return columns


def cell(value: Any) -> Any:
    """A value of a table. What has no other form is its text, and what is missing is null."""
    pandas = sys.modules["pandas"]
    try:
        if value is None or value is pandas.NaT or value is pandas.NA:
            return None
        return keyed(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def as_chart(figure: Any) -> dict[str, Any] | None:
    """A figure of matplotlib as data, if what it shows is known."""
    try:
        from e2b_charts import chart_figure_to_dict
    except ImportError:
        return None
    try:
        return chart_figure_to_dict(figure) or None
    except Exception:  # noqa: BLE001 - the picture is there without it
        return None


def as_png(image: Any) -> bytes | None:
    """An image of Pillow."""
    make = getattr(image, "_repr_png_", None)
    return make() if make else None


class Watch(MetaPathFinder):
    """Prepares Pillow when a cell imports it, whichever way."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders say, with the preparation after it."""
        if fullname != "PIL.Image":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def prepared(module: ModuleType) -> None:
                execute(module)
                prepare_images(module)

            spec.loader.exec_module = prepared  # type: ignore[method-assign]
        return spec


def prepare_images(module: Any) -> None:
    """Shows images of Pillow as results, because there is no screen."""
    from IPython.display import display

    save = module.Image.save

    def shown(self: Any, title: Any = None) -> None:
        display(self)

    def saved(self: Any, fp: Any, format: Any = None, **options: Any) -> None:  # noqa: A002 - as Pillow calls it
        save(self, fp, format, **options)
        if isinstance(fp, str):
            display(self)

    module.Image.show, module.Image.save = shown, saved

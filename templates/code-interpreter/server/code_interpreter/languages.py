"""Languages and their kernels."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from code_interpreter.bash import BashKernel
from code_interpreter.bounds import Bounds
from code_interpreter.driver import DRIVERS, JavaKernel, NodeKernel, RKernel
from code_interpreter.jupyter import JupyterKernel
from code_interpreter.kernel import Kernel

# Languages that the recipe adds where it is asked to, by what shows that they are there.
ON_REQUEST = {"r": ("Rscript", Path("/usr/lib/R/site-library/jsonlite")), "java": ("java", DRIVERS / "classes")}
ALIASES = {"": "python", "py": "python", "js": "javascript", "ts": "typescript", "sh": "bash"}


class UnknownLanguage(ValueError):
    """A language that the template does not have; the text is for the client."""


@dataclass(frozen=True)
class Languages:
    """Makes kernels."""

    bounds: Bounds
    # The interpreter of cells, in an environment that is theirs.
    python: str = "python3"
    # Where the modules of the Python kernel and the packages of the driver of Node are.
    kernel: str = ""
    modules: str = ""

    def names(self) -> list[str]:
        """The languages that there are."""
        found = ["python", "bash"] if shutil.which("bash") else ["python"]
        if shutil.which("node"):
            found += ["javascript", "typescript"]
        return found + [name for name, (program, place) in ON_REQUEST.items() if place.exists() and shutil.which(program)]

    def named(self, language: str | None) -> str:
        """The language that a client means."""
        name = (language or "").strip().lower()
        name = ALIASES.get(name, name)
        # The others are looked for, because a cell may have installed them.
        if name != "python" and name not in self.names():
            advice = f"; the recipe adds it with the build argument LANGUAGES={name}" if name in ON_REQUEST else ""
            raise UnknownLanguage(f"the language {name[:40]!r} is not in this template, which has {', '.join(self.names())}{advice}")
        return name

    def make(self, language: str, cwd: str) -> Kernel:
        """A kernel that has not been started."""
        variables = self.environment()
        match language:
            case "python":
                # Its modules come last, so that nothing that a cell installs is hidden by them.
                bootstrap = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('code_interpreter_kernel', run_name='__main__', alter_sys=True)"
                command = [self.python, "-P", "-c", bootstrap, self.kernel, "-f", "{connection_file}"]
                return JupyterKernel(command, variables, cwd, self.bounds)
            case "bash":
                return BashKernel(variables, cwd, self.bounds)
            case "r":
                return RKernel(variables, cwd, self.bounds)
            case "java":
                return JavaKernel(variables, cwd, self.bounds)
            case _:
                return NodeKernel(variables, cwd, self.bounds, self.modules, language == "typescript")

    def environment(self) -> Mapping[str, str]:
        """The environment of kernels: that of the server, with the programs of Python's environment first."""
        path = os.environ.get("PATH", os.defpath)
        programs = os.path.dirname(self.python)
        return {**os.environ, "PATH": f"{programs}:{path}" if programs else path, "PYTHONDONTWRITEBYTECODE": ""}

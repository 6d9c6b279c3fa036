"""A package whose build waits until it may go on, and works meanwhile."""

import hashlib
import os
import pathlib

from setuptools import setup

[module] = pathlib.Path().glob("slow*.py")
number = module.stem.removeprefix("slow")
state = pathlib.Path("/tmp/pip")
(state / f"at{number}").touch()
while not (state / f"go{number}").exists():
    hashlib.sha256(os.urandom(1 << 16)).digest()
setup(name=module.stem, version="1.0", py_modules=[module.stem])

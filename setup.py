"""Only for the one C file, which is optional: without a compiler the install goes on, and shared memory reports why it is missing.

Everything else about the package is in pyproject.toml. For development: python setup.py build_ext --inplace
"""

import sys

from setuptools import Extension, setup

extensions = []
if sys.platform == "linux":
    extensions.append(
        Extension(
            "transports._words",
            ["transports/_words.c"],
            extra_compile_args=["-O2", "-std=c11", "-Wall", "-Wno-unused-parameter"],
            optional=True,
        )
    )

setup(ext_modules=extensions)

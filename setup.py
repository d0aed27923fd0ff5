"""Only for the C modules, which are optional: without a compiler the install goes on, shared memory reports why it is missing, and
products and what is between them are the library's.

Everything else about the package is in pyproject.toml. For development: python setup.py build_ext --inplace
"""

import sys

from setuptools import Extension, setup

extensions = []
if sys.platform == "linux":
    extensions.append(
        Extension(
            "transports._words",
            ["transports/_words.c", "transports/_records.c", "transports/_copier.c", "transports/_loans.c"],
            depends=["transports/_words.h"],
            extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wno-unused-parameter", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    )
    extensions.append(
        Extension(
            "operators._panels",
            ["operators/_panels.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wno-unused-parameter", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    )
    extensions.append(
        Extension(
            "operators._rows",
            ["operators/_rows.c", "operators/_attend.c", "operators/_routing.c"],
            depends=["operators/_rows.h"],
            extra_compile_args=[
                "-O3",
                "-std=gnu11",
                "-Wall",
                "-Wno-unused-parameter",
                "-Wno-psabi",
                "-fopenmp",
                "-ffp-contract=off",
                "-fvisibility=hidden",
            ],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    )

setup(ext_modules=extensions)

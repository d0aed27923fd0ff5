"""Only for the C modules, which are optional: without a compiler the install goes on, shared memory reports why it is missing, and
products and what is between them are the library's.

Everything else about the package is in pyproject.toml. For development: python setup.py build_ext --inplace
"""

import sys

from setuptools import Extension, setup

extensions = [
    Extension(
        "flowrt.dataflow._common_case",
        ["flowrt/dataflow/_common_case.c"],
        extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wno-unused-parameter"],
        optional=True,
    )
]
if sys.platform == "linux":
    extensions.append(
        Extension(
            "flowrt.transports.native._words",
            [
                "flowrt/transports/native/_words.c",
                "flowrt/transports/native/_records.c",
                "flowrt/transports/native/_envelopes.c",
                "flowrt/transports/native/_copy_thread.c",
                "flowrt/transports/native/_loans.c",
            ],
            depends=["flowrt/transports/native/_words.h"],
            extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wno-unused-parameter", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    )
    extensions.extend(
        Extension(
            f"flowrt.operators.kernels.cpu.{name}",
            [f"flowrt/operators/kernels/cpu/{name}.c"],
            depends=["flowrt/operators/kernels/cpu/_groups.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wno-unused-parameter", "-fopenmp"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name in ("_panels", "_wide_panels")
    )
    extensions.append(
        Extension(
            "flowrt.operators.kernels.cpu._rows",
            ["flowrt/operators/kernels/cpu/_rows.c", "flowrt/operators/kernels/cpu/_attend.c", "flowrt/operators/kernels/cpu/_routing.c"],
            depends=["flowrt/operators/kernels/cpu/_rows.h"],
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
    extensions.append(
        Extension(
            "flowrt.operators.kernels.cpu._pages",
            ["flowrt/operators/kernels/cpu/_pages.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wno-unused-parameter"],
            optional=True,
        )
    )

setup(ext_modules=extensions)

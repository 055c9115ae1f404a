"""Builds the CPU library where a C++ compiler is found; without one the package is pure Python."""

from __future__ import annotations

from glob import glob

from setuptools import Extension, setup

# Not a Python module: it is loaded through ctypes. Contraction of a product and a sum into one
# rounding would change bits.
CPU = Extension(
    "meshplan.kernel._cpu",
    sources=["csrc/cpu.cpp", "csrc/entry.cpp"],
    depends=sorted(glob("csrc/*.h")),
    language="c++",
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=off", "-fno-fast-math"],
    optional=True,
)

setup(ext_modules=[CPU])

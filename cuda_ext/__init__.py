"""Kernels of the operators: C++ for CPUs in `cpu/`, CUDA in `cuda/`, one schema for both in `library.cpp`.

What belongs here: loops over pixels, and `build.py`, which compiles them. What never does: autograd, fake kernels, modules
(see `san/ops`, `san/nn`), images (see `pipelines`).
"""

"""Kernels of the operators: C++ for CPUs in `cpu/`, CUDA in `cuda/`, images in `resample.cpp`, their schemas in `schemas.py`.

What belongs here: loops over pixels, and `build.py`, which compiles them. What never does: autograd, fake kernels, modules
(see `san/ops`, `san/nn`), files of images (see `pipelines`).
"""

"""Packaging. `pip install .` installs the library `san`; the extra `experiments` adds the system.

The kernels are compiled once, at first use, for the installed PyTorch (see cuda_ext/build.py).
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="san-attention",
    # Read from the file, because importing san needs torch.
    version=re.findall(r'^__version__ = "(.+)"', (ROOT / "san" / "__init__.py").read_text(), re.MULTILINE)[0],
    description="Vector self-attention networks for image recognition: operators, models and experiments",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    project_urls={"Paper": "https://arxiv.org/abs/2004.13621"},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Scientific/Engineering :: Image Recognition",
        "Typing :: Typed",
    ],
    license="MIT",
    python_requires=">=3.11",
    packages=find_packages(include=["san*", "cuda_ext*", "pipelines*", "experiments*", "cluster*"]),
    package_data={
        "san": ["py.typed", "weights/*/*"],
        "cluster": ["ray/*.yaml", "kuberay/*.yaml", "compose.yaml", "Dockerfile*"],
        "cuda_ext": ["**/*.h", "**/*.cpp", "**/*.cu", "**/*.cuh", "prebuilt/*.so"],
        "experiments": ["grids/*.yaml", "grids/profiles/*.yaml", "paper/*.yaml", "report/*.html"],
    },
    install_requires=["torch>=2.11", "safetensors>=0.4"],
    extras_require={
        "experiments": [
            "nvidia-dali-cuda120>=2.4",
            "ray[default,train,tune]>=2.60",
            "deepspeed>=0.19.5",
            "mlflow>=3.17",
            "boto3>=1.36",  # from this version on, puts with If-Match
            "pyyaml",
            "pydantic>=2",
            "click",
            "jinja2",
            "rich",
            "matplotlib",
            "scikit-learn",
            "scipy",
            "pillow",
            "psutil",
            "nvidia-ml-py",  # for MLflow's GPU metrics
        ],
        "onnx": ["onnxscript>=0.7"],
        "hub": ["huggingface_hub>=1"],
        "dev": [
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "types-PyYAML", "clang-format"),
            *("onnxscript", "onnxruntime"),
            *("build", "mkdocs-material>=9.5", "mkdocstrings[python]>=1.0"),
            "moto[s3,server]>=5",  # an S3 server for tests with buckets
            "foolbox>=3.3.4",  # to compare the attack with the library that the paper's authors used
        ],
        "server": ["mlflow[auth]>=3.17", "psycopg[binary]>=3.2"],  # a tracking server with accounts on PostgreSQL
    },
    entry_points={"console_scripts": ["san=experiments.__main__:main"]},
)

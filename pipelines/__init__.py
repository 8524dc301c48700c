"""Turns folders of images into normalized batches on a device.

`pipelines.datasets` reads files on disk. The other files choose the order of the images, and decode, crop and normalize them
with NVIDIA DALI. This package knows nothing about models or training.

DALI takes about a gigabyte of memory. It is loaded when the first epoch starts, not when this package is imported.
"""

from pipelines.datasets.cifar import CIFAR, prepare_cifar
from pipelines.datasets.dataset import Dataset
from pipelines.datasets.digits import prepare_digits
from pipelines.errors import DataError, DecodingError
from pipelines.loader import Batch, Loader
from pipelines.transform import Transform

__all__ = [
    "CIFAR",
    "Batch",
    "DataError",
    "Dataset",
    "DecodingError",
    "Loader",
    "Transform",
    "prepare_cifar",
    "prepare_digits",
]

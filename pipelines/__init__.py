"""Images to tensors: folders of encoded images in, normalised batches on a device out.

Here belong: what a dataset on disk is, the order in which its images are seen, and the one graph that
decodes, crops and normalises them with NVIDIA DALI. Never here: models, losses, metrics, anything that knows
what the images are for.

DALI weighs about a gigabyte; it is loaded when the first epoch begins (`pipelines.dali`), not when this
package is imported.
"""

from pipelines.datasets.dataset import Dataset
from pipelines.datasets.digits import DIGITS, prepare_digits
from pipelines.errors import DataError, TransformError
from pipelines.loader import Batch, Loader
from pipelines.transform import Transform

__all__ = ["DIGITS", "Batch", "DataError", "Dataset", "Loader", "Transform", "TransformError", "prepare_digits"]

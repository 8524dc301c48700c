"""Where runs are kept when no folder is shared: a bucket, who may write there, and what a node has of it."""

from __future__ import annotations

from experiments.runs.bucket import Bucket, StorageError, is_uri
from experiments.runs.lease import Lease, LeaseError, writer_in
from experiments.runs.mirror import Mirror

__all__ = ["Bucket", "Lease", "LeaseError", "Mirror", "StorageError", "is_uri", "writer_in"]

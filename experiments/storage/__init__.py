"""Where runs are kept when no folder is shared: a bucket, who may write there, and what a node has of it."""

from __future__ import annotations

from experiments.storage.bucket import Bucket, StorageError, is_uri
from experiments.storage.lease import Lease, LeaseError, writer_in
from experiments.storage.mirror import Mirror

__all__ = ["Bucket", "Lease", "LeaseError", "Mirror", "StorageError", "is_uri", "writer_in"]

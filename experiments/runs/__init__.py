"""Where runs are kept: the workspace, locks, and a bucket with its leases and each node's working copy."""

from __future__ import annotations

from experiments.runs.bucket import Bucket, StorageError, is_uri
from experiments.runs.lease import Lease, LeaseError, writer_in
from experiments.runs.mirror import Mirror

__all__ = ["Bucket", "Lease", "LeaseError", "Mirror", "StorageError", "is_uri", "writer_in"]

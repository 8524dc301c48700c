"""Exceptions with messages for users."""


class ClusterError(ValueError):
    """The cluster cannot be used as requested. The message is for users."""


class ClusterLostError(ClusterError):
    """The cluster was lost while it was in use."""

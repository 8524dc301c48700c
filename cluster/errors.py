"""Exceptions with messages for users."""


class ClusterError(ValueError):
    """The cluster cannot be used as requested. The message is for users."""

"""Exceptions with messages for users."""


class ClusterError(ValueError):
    """The cluster cannot be used as requested. The message is for users."""


class StartError(ClusterError):
    """Ray did not start on this machine; another attempt may succeed."""

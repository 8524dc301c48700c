"""Exceptions with messages for users."""

TOKEN_HINT = "set RAY_AUTH_MODE=token, and save the cluster's token to ~/.ray/auth_token or set RAY_AUTH_TOKEN"
"""For messages: how to send a cluster's token."""


class ClusterError(ValueError):
    """The cluster cannot be used as requested. The message is for users."""


class LostError(ClusterError):
    """Trials were lost; the same request may succeed later."""

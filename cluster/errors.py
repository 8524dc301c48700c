"""The exceptions that users of this package are meant to read."""


class ClusterError(ValueError):
    """A request that the cluster cannot serve, said in one sentence."""


class ClusterLostError(ClusterError):
    """The cluster went away while it was used."""

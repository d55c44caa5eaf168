"""The errors of a cluster, in words for the person at the terminal."""


class ClusterError(Exception):
    """A cluster could not be started, changed or removed; the message says what to do."""


class NoBackendError(ClusterError):
    """This machine can run no cluster at all."""

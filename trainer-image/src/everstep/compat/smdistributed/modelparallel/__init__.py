"""`torch` is offered; `tensorflow` is not."""

# The library's last version of this kind, whose public documentation the names follow.
__version__ = "1.15.0"

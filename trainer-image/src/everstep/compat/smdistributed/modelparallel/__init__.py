"""`torch` is offered; `tensorflow` is not."""

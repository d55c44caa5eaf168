"""End-to-end tests: a real cluster, real images, real faults.

Scenarios and chaos belong here; a test that needs no node belongs in ``tests/``.
"""

"""For all tests: a random example may take as long as the machine needs for it."""

from hypothesis import settings

settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")

"""Settings of every test: hypothesis times no example, since a busy machine may hold up any of them."""

from hypothesis import settings

settings.register_profile("kvoffload", deadline=None)
settings.load_profile("kvoffload")

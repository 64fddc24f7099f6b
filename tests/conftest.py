"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about the machine's neighbours than about the code.
settings.register_profile("octavo", deadline=None)
settings.load_profile("octavo")

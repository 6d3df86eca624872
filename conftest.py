"""Fixtures and hooks of all tests, in tests/ and in extras/."""

pytest_plugins = ("tests.support.plugin",)

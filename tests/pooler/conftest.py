"""A durable server for each module, and a site on a database of its own for each test."""

from tests.process.site import durable_server, place

__all__ = ["durable_server", "place"]

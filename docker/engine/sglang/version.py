"""The version is the one the wheel says; a bare source tree is 0.5.11."""

from importlib import metadata

try:
    __version__ = metadata.version("sglang")
except metadata.PackageNotFoundError:
    __version__ = "0.5.11"

RELEASE = tuple(int(part) for part in __version__.split(".")[:3] if part.isdigit())

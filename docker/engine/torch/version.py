"""What this build is: CUDA 13 since 2.10, CUDA 12 before, as PyPI's wheels are."""

from importlib import metadata

try:
    _release = metadata.version("torch")
except metadata.PackageNotFoundError:
    _release = "2.11.0"

cuda = "13.0" if tuple(int(p) for p in _release.split(".")[:2]) >= (2, 10) else "12.8"
hip = None
__version__ = f"{_release}+cu{cuda.replace('.', '')}"

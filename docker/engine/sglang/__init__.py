"""Look-alike of SGLang for the container lab: its arguments, log lines, endpoints and deaths.

No model runs. The forms follow recorded runs of SGLang 0.5.11.
"""

from sglang.version import __version__

__all__ = ["__version__"]

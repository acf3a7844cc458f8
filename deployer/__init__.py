"""deployer: from a bare GPU box to a proven-good LLM endpoint over SSH."""

__version__ = "0.1.0"

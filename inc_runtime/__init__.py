"""In-network-computing all-to-all for Mixture-of-Experts: protocol, symmetric heap, one-sided verbs, backends."""

__version__ = "0.1.0"

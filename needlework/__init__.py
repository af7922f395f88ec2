"""Sequence mixers that find the needle: five papers' rules, their baselines, and the models around them."""

__version__ = "0.1.0"

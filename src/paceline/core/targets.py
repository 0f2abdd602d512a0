"""What a target may be beside a token."""

IGNORE = -100
"""Target of a position that does not count: padding, or the first token of another document."""

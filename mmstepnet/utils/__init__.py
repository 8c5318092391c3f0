"""Helpers of the package that belong to no other part."""

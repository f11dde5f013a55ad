"""Fixture for float64 on each engine, for the test files that request it."""

from keras_float64 import float64, lift, uncertified

__all__ = ["float64", "uncertified"]

lift()

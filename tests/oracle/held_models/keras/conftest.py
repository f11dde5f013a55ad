"""Fixture for float64 on each engine, for the test files that request it."""

from keras_float64 import enable_float64, float64, uncertified

__all__ = ["float64", "uncertified"]

enable_float64()

"""float64 on every engine, for the files that ask for it."""

from keras_float64 import float64, lift, uncertified

__all__ = ["float64", "uncertified"]

lift()

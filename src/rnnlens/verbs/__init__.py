"""The functions of the public interface, one module each: resolve the adapter, compute, return the result.

They are in a folder of their own so that ``rnnlens.trace`` is always the function and never the module.
"""

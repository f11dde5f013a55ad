"""The verbs of the public interface; each module reads top to bottom: adapter, recurrence, result.

They live in a folder of their own so that ``rnnlens.trace`` is always the function and never the module.
"""

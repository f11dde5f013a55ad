"""The functions of the public interface, one module each, in a folder so that ``rnnlens.trace`` is the function."""

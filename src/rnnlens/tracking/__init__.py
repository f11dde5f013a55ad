"""Tracking of training: watches record gradients and states into a run, loggers and alerts."""

"""Tests of plain torch models need no fixtures or settings."""

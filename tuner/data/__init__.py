"""Measured rows shipped with the package: one ``<gpu>.json.gz`` a GPU, in the format of ``tuner.export``."""

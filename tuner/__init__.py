"""The tuner: sweeps configs, keeps every result, picks winners and freezes them into lookup tables."""

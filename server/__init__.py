"""HTTP service over the results database: lookups, rows, curves, releases and the dashboard."""

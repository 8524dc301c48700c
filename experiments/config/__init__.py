"""Grids: YAML files, their records and profiles, and how they expand to trials."""

"""Runs: a recipe, its directory, what is measured of it; many of them side by side, stopped and resumed."""

"""Runs: a recipe trains and is measured in its directory; a comparison or a sweep runs many. All of it stops and resumes."""

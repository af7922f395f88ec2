"""Runs: each is a Python function that returns its full config, a `needlework.experiment.runner.Recipe`."""

"""The second study: six experiments, each one small file with its recipes, claims, metrics, thresholds and seeds."""

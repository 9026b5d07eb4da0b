"""From the name of a model to weights in memory: where it is, what it needs, how it is loaded."""

"""The self-test: production code against the oracle, and against its own known ways to be wrong."""

"""Ground truth for small languages: everything a run estimates, summed over all responses."""

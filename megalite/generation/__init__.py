"""Text from trained weights, on any tensor- and pipeline-parallel layout."""

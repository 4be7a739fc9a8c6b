"""Growth between stages: from a state dict to a larger one, and from a checkpoint to a larger one. Needs torch only."""

"""Growth between stages: add experts to a state dict or to a checkpoint file. Needs only torch."""

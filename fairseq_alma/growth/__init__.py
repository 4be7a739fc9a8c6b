"""Growth between stages: state dict -> state dict, checkpoint -> checkpoint, no hidden state."""

"""pi0.5: from checkpoint to robot actions."""

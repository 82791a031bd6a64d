"""GR00T N1.7: from checkpoint to robot actions."""

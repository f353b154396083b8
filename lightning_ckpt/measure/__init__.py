"""What a step costs: bytes saved for backward, live and peak bytes, times. Plain PyTorch, no Lightning."""

"""Execute a plan by point-to-point messages, over any transport."""

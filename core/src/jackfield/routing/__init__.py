"""What rollouts are made with: the router of their requests."""

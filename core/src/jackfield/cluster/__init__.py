"""Replicas and their devices: the replica pool, the device lease, and the control interface for other processes."""

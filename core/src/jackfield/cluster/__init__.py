"""The replica pool, the device lease, and the control interface for other processes."""

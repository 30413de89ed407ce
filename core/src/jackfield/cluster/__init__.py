"""Where workers live: the replica pool, the lease on devices, and what other processes see of them."""

"""Workers in Ray actors: the cluster, the host of a worker, and the connection to it."""

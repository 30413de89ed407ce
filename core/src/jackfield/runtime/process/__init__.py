"""Workers of the cluster ``inline`` that have a process, and an interpreter, of their own."""

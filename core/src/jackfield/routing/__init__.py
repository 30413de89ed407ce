"""Routing of generation requests to replicas."""

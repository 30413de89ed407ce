"""For tests: the plugin's server on a vLLM that stays from one server to the next, since it takes long to start.

The tests install this package as a plugin of its own where only vLLM's interpreter sees it.
"""

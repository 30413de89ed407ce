"""The agent ``gateway``: programs that speak OpenAI's API are trained as they are."""

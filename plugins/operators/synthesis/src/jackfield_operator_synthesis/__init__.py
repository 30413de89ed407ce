"""Operators that make new rows of experiences: repairs, variants, splices, counterfactuals, summaries and pairs."""

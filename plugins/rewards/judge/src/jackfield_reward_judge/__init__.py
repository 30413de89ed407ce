"""Language models as judges: rubrics, several judges, comparisons in pairs."""

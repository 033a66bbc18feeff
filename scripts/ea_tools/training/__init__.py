"""Training a model: recipes, launching, the run's folder."""

"""What trains a model: recipes, launching, the run's folder."""

"""Use of a trained model: translating and scoring text."""

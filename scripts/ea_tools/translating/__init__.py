"""What uses a trained model: translating and scoring text."""

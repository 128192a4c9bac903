"""Publish a trained model on the Hub, verify what was published, and serve the model."""

"""Publish a trained model on the Hub: build its release folder with the card, check, push and verify it; serve it."""

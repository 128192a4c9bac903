"""Measurements of a vision-language model: norms at the modality interface and update rates in the decoder."""

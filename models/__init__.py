"""Decoders, their weights, and the text that goes in and out of them."""

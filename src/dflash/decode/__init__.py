"""Decoding with a drafter, and measuring how far it gets."""

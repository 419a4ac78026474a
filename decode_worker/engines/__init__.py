"""Decode engines behind one protocol."""

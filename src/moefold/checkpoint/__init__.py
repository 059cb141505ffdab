"""Checkpoints: saving, loading under any layout, and conversion to and from Hugging Face."""

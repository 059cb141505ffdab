"""How numbers are held and multiplied."""

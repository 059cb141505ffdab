"""A proposal as people read it: on a terminal, as data, and as one HTML page."""

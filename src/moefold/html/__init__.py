"""What every HTML page of moefold has in common: looks in two themes, a frame, scales. Nothing is fetched."""

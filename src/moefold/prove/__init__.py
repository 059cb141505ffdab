"""Does a layout compute what one process computes? Run both and compare everything."""

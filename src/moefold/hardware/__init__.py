"""What machines can do, as data."""

"""What a rank holds at its fullest moment, cause by cause."""

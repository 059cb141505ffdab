"""What a model consists of and how it is cut, known before anything is built."""

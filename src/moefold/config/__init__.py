"""What the user says: frozen nested dataclasses that any program can read without torch."""

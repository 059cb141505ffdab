"""Single-device modules with seams: code that has never heard of a process group."""

"""Pure tensor functions without process groups or modules; every fast path has an obvious ``*_reference``."""

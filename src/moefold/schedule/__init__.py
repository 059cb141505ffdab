"""Pipeline orders as data: built from sizes, rewritten by passes, checked, timed and drawn before a process starts."""

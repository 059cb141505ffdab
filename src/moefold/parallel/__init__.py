"""A model written for one device becomes one rank's share of a parallel one."""

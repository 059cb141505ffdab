"""moefold: plan, prove and train Mixture-of-Experts language models."""

__version__ = "0.1.0"

"""Adapters of other libraries' MoE layers."""
